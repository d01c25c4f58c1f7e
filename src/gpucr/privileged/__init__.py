"""What runs as root for ordinary users: root's CRIU behind a socket, one process per request, and rules for requests.

Its clients are the users' own gpucrs (`gpucr.helper`), which do everything but CRIU's part themselves and are not
trusted. docs/threat-model-helper.md has the attacks, tests/privileged a test for each.
"""

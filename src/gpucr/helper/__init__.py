"""Root's CRIU for ordinary users' jobs: a socket, one process per request, and the rules for requests.

The client is the user's own gpucr, which does everything but CRIU's part itself. docs/threat-model.md has the attacks.
"""

"""Root's CRIU for the jobs of ordinary users: a socket, one request a process, and what a request may be.

The client is the user's own gpucr, which does everything but CRIU's part itself. docs/threat-model.md has the attacks.
"""

"""A job's TCP connections while the job is saved, and those that are kept until it is restored.

A connection is saved in pieces, so no packet may reach either end meanwhile. gpucr blocks the packets itself, with
filters that belong to one operation (docs/adr/0070-connections-are-blocked-by-gpucr.md):

- ``filters``: the kernel's packet filter, in one network namespace;
- ``sockets``: a job's sockets, in all of its network namespaces;
- ``lock``: what one operation does to a job's sockets, and its undo;
- ``kept``: connections of a job that has ended, kept for its restore; ``records`` names them;
- ``steps``, ``recovery``: the steps, and what the guard or the next gpucr does.
"""

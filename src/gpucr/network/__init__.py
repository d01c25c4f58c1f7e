"""A job's TCP connections while the job is saved, and those that are kept until it is restored.

A connection is saved in pieces, so no packet may reach either end meanwhile. gpucr blocks the packets itself, with
filters that belong to one operation (docs/adr/0070-connections-are-blocked-by-gpucr.md):

- ``filters``: the kernel's packet filter, in one network namespace;
- ``sockets``: a job's sockets, in all of its network namespaces;
- ``lock``: what one operation does to a job's sockets, and its undo; ``records`` names it for other gpucr processes;
- ``kept``: connections of a job that has ended, kept for its restore;
- ``steps``, ``recovery``, ``left_behind``: the steps, the guard's actions, and what the next gpucr does.
"""

"""Kernel interfaces: processes, memory maps, namespaces, system calls. Nothing here knows about GPUs or snapshots."""

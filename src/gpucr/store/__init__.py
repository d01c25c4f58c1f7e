"""Many snapshots in one place, their pieces stored once: a folder or a prefix of an object store."""

CHECK_KNOWN_S = 24 * 3600.0
"""A dump reads what it relies on if that was last read longer ago (read_back.py)."""

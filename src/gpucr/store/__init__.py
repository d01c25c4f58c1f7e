"""Many snapshots in one place, their pieces stored once: a folder or a prefix of an object store."""

"""What the kernel tells and lets us do: processes, memory maps. Nothing here knows of GPUs or snapshots."""

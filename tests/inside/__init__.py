"""Tests that run in a machine of their own, as root: they fill disks, use up memory and pids, change the kernel."""

"""One contract for all batch systems: start or restore a job, and dump it before its allocation ends."""

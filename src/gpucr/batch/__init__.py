"""One contract for all batch systems: start a job or bring it back, and dump it before the machine is taken away."""

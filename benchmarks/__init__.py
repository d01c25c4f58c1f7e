"""Measurements of gpucr beside the plain driver and plain CRIU, in one run: ``python3 -m benchmarks --help``."""

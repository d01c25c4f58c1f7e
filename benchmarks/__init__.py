"""Measurements of gpucr beside the plain driver and plain CRIU, in one run: ``python -m benchmarks --help``."""

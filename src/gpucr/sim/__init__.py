"""The simulated driver: C sources of a libcuda.so.1 and a libnvidia-ml.so.1, and the counter program."""

"""The CUDA driver, as seen from outside the process that it acts on."""

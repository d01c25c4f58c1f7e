"""The CUDA driver, called from outside the process that it acts on."""

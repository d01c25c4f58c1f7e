"""The library that a CUDA process is started with (C, `native`), and the one side of its socket that speaks to it."""

"""The library preloaded into a CUDA process (C, `native`), and gpucr's client for it."""

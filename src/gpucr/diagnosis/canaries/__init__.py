"""Measure what this machine can bring back: checkpoint and restore gpucr's own small CUDA programs."""

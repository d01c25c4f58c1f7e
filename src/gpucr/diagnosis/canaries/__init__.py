"""What this machine can bring back, measured: small CUDA programs of gpucr's own are checkpointed and restored."""

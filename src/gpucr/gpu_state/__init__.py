"""Where device memory is while it is away from the GPU, and which GPU it comes back to."""

"""Jobs that sleep until they are asked: a forwarder in front of each, and rules for who may be on the GPU."""

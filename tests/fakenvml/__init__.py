"""A fake libnvidia-ml.so.1 in C, and a handle on the GPUs that it shows."""

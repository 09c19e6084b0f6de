"""A fake libnvidia-ml.so.1 in C, and control over the GPUs that it shows."""

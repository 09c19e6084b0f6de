"""The two sensors that ask NVML, NVIDIA's management library: one waits for events, one polls."""

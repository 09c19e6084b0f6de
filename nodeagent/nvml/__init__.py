"""The two sensors that call NVML, NVIDIA's management library: one waits for events, one polls."""

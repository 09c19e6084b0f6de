"""Watch one node's GPUs and host, say what is going bad, and what to do about it."""

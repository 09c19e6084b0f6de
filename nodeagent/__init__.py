"""Watches the GPUs and the host of one node, reports what is failing, and what to do about it."""

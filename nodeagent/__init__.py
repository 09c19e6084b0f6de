"""Watches the GPUs and the host of one node, and reports faults and their remedies."""

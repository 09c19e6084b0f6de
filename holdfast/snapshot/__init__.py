"""Copies of the training state in shared memory: the arena with the snapshots, and the private states."""

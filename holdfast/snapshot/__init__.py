"""Keep copies of the training state in shared memory: snapshots in the arena, and private states."""

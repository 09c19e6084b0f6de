"""Small checkpoints, snapshots and private states. Their content shows whether they are whole."""

"""Small checkpoints, snapshots and private states whose content shows whether they are whole."""

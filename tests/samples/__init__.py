"""Small checkpoints, snapshots and private states whose content tells whether they are whole."""

"""Checkpoints on durable storage: written, listed, verified and removed."""

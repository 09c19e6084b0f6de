"""Write, list, verify and remove checkpoints on durable storage."""

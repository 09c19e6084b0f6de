"""Provide what a training script uses: the session, the protected state, its steps and its batches."""

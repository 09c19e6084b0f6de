"""Measurements side by side with torchrun and plain memory copies. Not shipped."""

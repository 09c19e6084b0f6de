"""Checkpoints in object storage: requests to it, and transfers of files in parts."""

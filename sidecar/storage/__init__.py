"""Store checkpoints in object storage: send requests to it, and transfer files in parts."""

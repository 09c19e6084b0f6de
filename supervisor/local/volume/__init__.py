"""The folder of a local run in shared memory: create it, keep it complete, and remove it."""

"""The cases that tests/torch runs on a simulated device, on a real GPU. Skipped if there is none."""

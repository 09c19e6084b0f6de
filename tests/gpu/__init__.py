"""Tests of tests/torch's simulated-device cases on a real GPU; skipped if there is none."""

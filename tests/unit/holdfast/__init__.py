"""Unit tests of what a training script imports."""

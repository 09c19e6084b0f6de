"""Unit tests of those modules imported by a training script that use torch."""

"""Unit tests of the modules that a training script imports, as far as they use torch."""

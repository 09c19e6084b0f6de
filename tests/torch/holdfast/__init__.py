"""Unit tests of what a training script imports, where it has to do with torch."""

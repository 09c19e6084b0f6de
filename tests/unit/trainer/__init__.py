"""Unit tests of the parts of the trainers that need no torch."""

"""Unit tests of what the trainers have that needs no torch."""

"""Unit tests of what holds tensors: torch's import and its first optimizer take seconds of their own."""

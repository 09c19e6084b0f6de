"""Unit tests of code that uses torch, whose import and first optimizer take seconds."""

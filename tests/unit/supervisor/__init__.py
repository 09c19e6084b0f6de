"""Unit tests of the supervisor."""

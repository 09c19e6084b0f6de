"""Tests, by tier."""

"""Tests of the pure parts of `bench`."""

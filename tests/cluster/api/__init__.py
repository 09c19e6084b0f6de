"""Tests of `supervisor.kubernetes` against a real API server."""

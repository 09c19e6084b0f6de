"""Decode the reports of members, and distinguish those that need an immediate decision."""

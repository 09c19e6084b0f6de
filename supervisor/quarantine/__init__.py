"""Decide which nodes to take out of service, and when to bring them back. Pure."""

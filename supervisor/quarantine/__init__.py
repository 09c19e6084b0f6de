"""Decide which nodes to take out of service and when to return them. Pure."""

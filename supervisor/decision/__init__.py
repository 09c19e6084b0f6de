"""Decide what a job does next, compute its resulting state, and derive each member's order. Pure."""

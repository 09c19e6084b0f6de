"""Decide what a run does next and how it ends, compute the resulting state, and derive the orders. Pure."""

"""Inject Holdfast into pods when they are created: decide which pods, and what to add to them."""

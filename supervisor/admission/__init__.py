"""Inject Holdfast into pods when they are created: decide which, and what is added to them."""

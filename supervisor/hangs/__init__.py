"""Decide whether a group that completes no steps hangs, and which rank holds it up. Pure."""

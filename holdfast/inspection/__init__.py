"""Inspection of processes from outside: what a rank is doing, where it waits, and why it ended."""

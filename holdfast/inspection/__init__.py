"""Looks at processes from outside: what a rank does, where it waits, and why it ended."""

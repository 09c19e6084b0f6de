"""Turns observations into findings and verdicts: no I/O, no clock, and the order does not matter."""

"""Turns observations, in any order, into findings and verdicts. No I/O, no clock."""

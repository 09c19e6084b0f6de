"""Turns observations into findings and verdicts, whatever their order. No I/O, no clock."""

"""From observations to findings and verdicts: no I/O, no clock; the order does not matter."""

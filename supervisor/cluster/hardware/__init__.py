"""Faults of a run that the hardware of a node explains, as evidence for the quarantine."""

"""Faults of a run that a node's hardware explains, as evidence for the quarantine."""

"""Compute how many standbys and which checkpoint interval a job needs. Pure."""

"""Manage the state that a member holds: exchange it with other members, verify it, and save it to storage."""

"""Manage a member's state: exchange it with other members, verify it, and save it to storage."""

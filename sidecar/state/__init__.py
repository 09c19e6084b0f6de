"""The state that a member holds: served to and fetched from others, checked, and saved to storage."""

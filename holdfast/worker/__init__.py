"""Runs the user's script in a rank or a warm process, from its command to its end."""

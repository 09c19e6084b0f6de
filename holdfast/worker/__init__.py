"""Execution of the user's script in a rank or a warm process, from the parsing of the command to the exit."""

"""Limit the memory and the event-loop time that the members of one tenant can take from the others."""

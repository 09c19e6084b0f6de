"""Limit what the members of one tenant may cost the others: memory, and time on the event loop."""

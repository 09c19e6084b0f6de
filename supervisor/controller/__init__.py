"""Supervise a run: receive reports, make and record decisions, send orders, and serve the API."""

"""One per run: decide, restart, account, serve the API."""

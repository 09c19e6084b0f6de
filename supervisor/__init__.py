"""The supervisor of a run: it decides about faults, accounts for the time, and serves the API."""

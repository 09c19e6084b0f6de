"""The supervisor of a run: it decides what to do about faults, accounts for time, and serves the API."""

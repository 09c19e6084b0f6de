"""The supervisor of a run. It decides what to do about faults, accounts for time, and serves the API."""

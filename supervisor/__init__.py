"""A run's supervisor: decides what to do about faults, accounts for time, and serves the API."""

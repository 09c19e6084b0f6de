"""The meaning of each signal: rules and tables as data, and their readers."""

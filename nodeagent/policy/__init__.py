"""What each signal means: rules and tables as data, and their readers."""

"""Many runs in simulated time: the supervisor killed at every point, faults of all kinds at any step."""

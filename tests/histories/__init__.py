"""Many histories in simulated time: any faults at any step, the supervisor killed at every point."""

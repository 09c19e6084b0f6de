"""What the supervisor knows about a job at one instant, and which faults that reveals. Pure."""

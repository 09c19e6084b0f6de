"""What the supervisor knows about a job at one instant, and the faults that this reveals. Pure."""

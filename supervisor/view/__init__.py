"""Represent what the supervisor knows about a job at one instant, and find the faults in it. Pure."""

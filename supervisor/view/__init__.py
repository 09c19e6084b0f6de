"""What the supervisor knows of a job at one instant, and the faults that it shows. Pure."""

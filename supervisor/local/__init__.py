"""Run a job on one machine: the keeper, the processes it starts, and their in-memory folder."""

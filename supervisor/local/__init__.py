"""Run a job on one machine: the keeper, the processes that it starts, and their folder in memory."""

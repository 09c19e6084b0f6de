"""A local run's keeper: starts all of the run's other processes and restarts those that die."""

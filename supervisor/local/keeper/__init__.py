"""The keeper of a local run, which starts all other processes of the run and restarts those that die."""

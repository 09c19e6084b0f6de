"""Supervise jobs on Kubernetes: find the pods of each job, run its supervision, and store its state."""

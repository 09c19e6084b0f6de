"""`python -m bench cluster-nodes`: how a job survives node faults, and what its protection costs."""

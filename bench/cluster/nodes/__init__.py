"""`python -m bench cluster-nodes`: node faults under a job, and the cost of what protects it from them."""

"""Two real supervisors of a cluster, with a small API server and without pods."""

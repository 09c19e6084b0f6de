"""The commands for jobs on a Kubernetes cluster, which access the API server with the user's permissions."""

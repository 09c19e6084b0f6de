"""The commands for jobs on a Kubernetes cluster. They use the API server with the user's permissions."""

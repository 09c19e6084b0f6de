"""The commands for jobs on a Kubernetes cluster. They query the API server with the user's own rights."""

"""The commands about jobs on a Kubernetes cluster. They ask the API server, with the user's own rights."""

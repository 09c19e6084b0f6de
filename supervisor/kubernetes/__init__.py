"""Work with the Kubernetes API server: requests, mirrors, leadership, certificates, identities and events."""

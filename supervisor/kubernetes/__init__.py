"""Use the Kubernetes API server for requests, mirrors, leadership, certificates, identities and events."""

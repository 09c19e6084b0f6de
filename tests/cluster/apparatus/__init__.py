"""What the tests act on: the cluster, its nodes, namespaces, storage, and a training job."""

"""Control over what the tests act on: the cluster, nodes, namespaces, storage, and a training job."""

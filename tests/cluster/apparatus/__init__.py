"""Control of the objects of the tests: the cluster, nodes, namespaces, storage, and a training job."""

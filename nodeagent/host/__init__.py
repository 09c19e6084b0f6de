"""The sensor of the host: file systems, resources, stuck threads and the wall clock."""

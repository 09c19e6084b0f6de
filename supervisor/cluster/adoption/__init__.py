"""Work out from pods and their owners which pods of a cluster form a job, and how many there must be."""

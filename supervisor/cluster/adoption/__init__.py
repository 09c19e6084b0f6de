"""Find out which pods of a cluster form a job, and how many there must be, from pods and their owners."""

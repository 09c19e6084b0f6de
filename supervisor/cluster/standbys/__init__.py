"""Standby pods: copies of a job's pods on other nodes, which take over the ranks of a lost member."""

"""Choose the members that run a generation's ranks, replace departing members, and assign the backups."""

"""Choose the members that run the ranks, replace those that leave or are cut off, and resize the group."""

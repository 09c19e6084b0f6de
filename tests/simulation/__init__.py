"""A job in simulated time: the world in which the decisions are tested, and tests of whole runs in it."""

"""A job in simulated time: the world where the decisions are tested, and tests of whole runs in it."""

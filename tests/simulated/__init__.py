"""What stands in for processes and machines in the tests of decisions: everything in simulated time."""

"""Choose which members and standbys keep copies of states, and find what the loss of a node destroys."""

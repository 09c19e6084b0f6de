"""Collect and restore the state of live objects, and detect changes to it and mistakes in its use."""

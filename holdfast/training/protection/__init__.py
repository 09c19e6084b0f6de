"""Protect one rank's state: decide when and where to copy it, and detect changes made in the meantime."""

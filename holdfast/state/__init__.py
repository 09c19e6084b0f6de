"""The state of live objects: collecting it, restoring it, and detecting changes and mistakes."""

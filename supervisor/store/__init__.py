"""The files of a run: its directory, the journal, and the lock by which one supervisor leads."""

"""The files of a run: its directory, the journal, and the lock that makes one supervisor the leader."""

"""One per member: watch the ranks, own the snapshots, talk to the supervisor."""

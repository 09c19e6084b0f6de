"""What a run reports about itself: the ledger of its time, its status, incidents and metrics."""

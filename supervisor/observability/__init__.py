"""What a run tells about itself: the ledger of its time, status, incidents and metrics."""

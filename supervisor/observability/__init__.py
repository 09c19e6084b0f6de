"""What a run reports about itself: its time ledger, status, incidents and metrics."""

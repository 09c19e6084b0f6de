"""The shell around the decision: receives reports, records decisions, sends orders and serves the API."""

"""The shell around the decision. It receives reports, records decisions, sends orders and serves the API."""

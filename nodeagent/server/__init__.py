"""What a serving agent publishes: its HTTP API, metrics, report, injections and log lines."""

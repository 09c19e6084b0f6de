"""The interfaces of a serving agent: HTTP API, metrics, report, injections and log lines."""

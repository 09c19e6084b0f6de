"""Publishes the agent's report on its own Node object: two conditions, the evidence, and a heartbeat."""

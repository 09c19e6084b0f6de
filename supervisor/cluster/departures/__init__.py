"""Departures of members: announcements that a pod or a node is about to end."""

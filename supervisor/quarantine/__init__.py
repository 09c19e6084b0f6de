"""Decide which nodes to take out of service, and when to bring them back. Pure.

No program calls this yet: `bench quarantine` and the tests simulate the pool that it decides about.
"""

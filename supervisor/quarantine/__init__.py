"""Decide which nodes to take out of service, and when to bring them back. Pure.

`supervisor.nodes` carries the decisions out on a cluster. `bench quarantine` and the tests simulate the pool.
"""

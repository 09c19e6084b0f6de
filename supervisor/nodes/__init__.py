"""Carry out the quarantine's decisions on the Nodes of a cluster, and describe the nodes to operators.

`node_objects` and `agent_reports` read Nodes, `supervisor.quarantine` decides, `plan` and `patches` determine
what to write, and `controller` writes it. `summary` and `announcements` contain everything for people.
"""

"""Carry out the quarantine's decisions on the Nodes of a cluster, and describe the nodes to operators.

`node_objects` and `agent_reports` read Nodes, `supervisor.quarantine` decides, `plan` and `patches` say what
to write, and `controller` does it. What only people read is in `summary` and `announcements`.
"""

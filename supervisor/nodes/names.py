"""The names that the supervisor uses on Node objects. Pure."""

from __future__ import annotations

from supervisor.admission.pod_layout import PREFIX

# Written by the supervisor
MANAGER = "holdfast-quarantine"  # the field manager
TAINT = PREFIX + "unhealthy"
CONDITION = "HoldfastQuarantined"
RECORD = PREFIX + "quarantine"  # what is stored between decisions, as JSON

# Written by an operator, and removed by the supervisor: "release" or "quarantine: WHY"
REQUEST = PREFIX + "quarantine-request"
REQUESTED_BY = PREFIX + "quarantine-requested-by"  # the name that an admission policy compares with the user

VERDICTS = ("GpuHealthy", "TrainingNodeHealthy")  # conditions that the node agent writes

READY = "Ready"  # the kubelet's condition
# Three bad nodes of a rack are a storm of that rack. Do not use the zone: it contains most of a pool.
RACK = "topology.kubernetes.io/rack"
CONFIG = "holdfast-quarantine"  # the ConfigMap with the operator's settings

"""Read a node's rack from its labels. The nodes of a rack may fail together. Pure.

Kubernetes defines labels for the region and the zone of a node, but none for its rack. Operators and
schedulers of large clusters use their own labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

# The most precise label first. An operator can name others in `environment.RACK_LABELS`.
RACK_LABELS = ("topology.kubernetes.io/rack", "topology.kubernetes.io/zone")


def rack_labels(setting: str) -> tuple[str, ...]:
    """Return the labels in the operator's comma-separated setting; the default labels if it is ""."""
    return tuple(filter(None, (each.strip() for each in setting.split(",")))) or RACK_LABELS


def rack_of(labels: Mapping[str, object], names: Sequence[str] = RACK_LABELS) -> str:
    """Return the value of the first of the labels `names` that the node has; "" if it has none of them."""
    found = (labels.get(name) for name in names)
    return next((each for each in found if isinstance(each, str) and each), "")

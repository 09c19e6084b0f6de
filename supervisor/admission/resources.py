"""Compute the size of the memory volume, and the resources of Holdfast's containers. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

KI, MI, GI = 1 << 10, 1 << 20, 1 << 30
_QUANTITY = re.compile(
    r"([+-]?(?:\d{1,24}(?:\.\d{0,24})?|\.\d{1,24}))(?:[eE]([+-]?\d{1,2})|(Ki|Mi|Gi|Ti|Pi|Ei|[numkMGTPE]))?",
    re.ASCII,
)
_SUFFIXES = {
    **{name: Fraction(1024) ** power for power, name in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi", "Ei"), 1)},
    **{name: Fraction(1000) ** power for power, name in enumerate(("k", "M", "G", "T", "P", "E"), 1)},
    **{name: Fraction(1, 1000**power) for power, name in enumerate(("m", "u", "n"), 1)},
}

# The request and the limit of each of Holdfast's containers. The CPU limit is not a whole number: if it were,
# a node with the static CPU policy would reserve a core for the sidecar, which is idle most of the time.
_AMOUNTS = {
    "cpu": ("100m", "900m"),
    "memory": ("128Mi", "512Mi"),
    "ephemeral-storage": ("64Mi", "256Mi"),
}
_QOS = ("cpu", "memory")  # the resources that determine a pod's QoS class
DEFAULT_VOLUME_BYTES = 2 * GI
_MARGIN_BYTES = 64 * MI  # for sockets, logs, progress pages and private states


@dataclass(frozen=True, slots=True)
class OwnResources:
    """The `resources` of Holdfast's two containers, which can be empty, and whether the pod is Guaranteed."""

    setup: Mapping[str, Mapping[str, str]]
    sidecar: Mapping[str, Mapping[str, str]]
    guaranteed: bool


def quantity(value: object) -> Fraction:
    """Return the number that `value`, such as "500m", "4Gi" or 2, represents. Raises `ValueError`."""
    match = _QUANTITY.fullmatch(str(value)) if isinstance(value, str | int | float) else None
    if match is None or isinstance(value, bool):
        raise ValueError(f"{value!r} is not a quantity such as 500m or 4Gi")
    number, exponent, suffix = match.groups()
    return Fraction(number) * Fraction(10) ** int(exponent or 0) * _SUFFIXES.get(suffix, Fraction(1))


def size(count: int) -> str:
    """Return a number of bytes in the API server's notation, such as 10Gi, 10304Mi or 1000."""
    for name, unit in (("Gi", GI), ("Mi", MI), ("Ki", KI)):
        if count and count % unit == 0:
            return f"{count // unit}{name}"
    return str(count)


def memory_limit(container: Mapping[str, Any], spec: Mapping[str, Any]) -> int | None:
    """Return how many bytes a container may use, from its own limit or the pod's; None if neither is set.

    Raises:
        ValueError: The limit is not a quantity.
    """
    limit = _amount(container, "limits", "memory") or _amount(spec, "limits", "memory")
    return int(limit) if limit else None


def volume_bytes(state_bytes: int | None, limit_bytes: int | None) -> int:
    """Return the size of the memory volume, a whole number of MiB.

    The volume has room for two snapshots of a training state of `state_bytes`, plus a quarter. If
    `state_bytes` is None, the size is half of the training container's limit, or 2 GiB if there is no limit.
    """
    if state_bytes is not None:
        return math.ceil((2 * state_bytes * Fraction(5, 4) + _MARGIN_BYTES) / MI) * MI
    if limit_bytes is None:
        return DEFAULT_VOLUME_BYTES
    return max(1, limit_bytes // 2 // MI) * MI


def own_resources(
    containers: Sequence[Mapping[str, Any]],
    spec: Mapping[str, Any],
    memory_volume_bytes: int,
    copy_bytes: int = 0,
) -> OwnResources:
    """Return resources for Holdfast's containers that preserve the pod's QoS class and satisfy quotas.

    `containers` contains all of the user's containers, including init containers. If all of them request (or
    limit) a resource, so do Holdfast's containers, because a quota may refuse containers without it. If no
    container sets any resource, neither do Holdfast's, and the pod remains BestEffort. In a Guaranteed pod,
    the requests of Holdfast's containers equal their limits. If the resources are set for the whole pod
    (`spec.resources`), Holdfast's containers set none.

    The kernel charges each page of a memory volume to the container that first writes it, and counts it
    against that container's limit. Ranks write snapshots, so the volume must fit into the training
    container's limit, which belongs to the user and is never changed. The sidecar writes the snapshots that
    it receives from other members, which can fill the whole volume. Its memory limit, if it has one, is
    therefore the limit for its process plus the size of the volume. Only in a Guaranteed pod does this raise
    the pod's requests, by the same amount. Similarly, the sidecar's limit for disk space, if it has one,
    includes `copy_bytes` for a copy of a checkpoint, because the disk usage of the pod may not exceed the sum
    of its containers' limits.

    Raises:
        ValueError: A container's resource is not a quantity.
    """
    if _is_given(spec):
        return OwnResources({}, {}, guaranteed=False)
    guaranteed = all(_is_guaranteed(each) for each in containers)
    extra = {"memory": memory_volume_bytes, "ephemeral-storage": copy_bytes}
    return OwnResources(
        _copied(containers, guaranteed, {}), _copied(containers, guaranteed, extra), guaranteed
    )


def _copied(
    containers: Sequence[Mapping[str, Any]], guaranteed: bool, extra_bytes: Mapping[str, int]
) -> dict[str, dict[str, str]]:
    requests, limits = dict[str, str](), dict[str, str]()
    for name, (request, limit) in _AMOUNTS.items():
        if name in extra_bytes:
            limit = size(int(quantity(limit)) + extra_bytes[name])
        if all(_amount(each, "limits", name) for each in containers):
            limits[name] = limit
        if all(_requested(each, name) for each in containers):
            requests[name] = limit if guaranteed and name in limits else request
    return {kind: found for kind, found in (("requests", requests), ("limits", limits)) if found}


def _is_guaranteed(container: Mapping[str, Any]) -> bool:
    limits = [_amount(container, "limits", name) for name in _QOS]
    return all(limits) and limits == [_requested(container, name) for name in _QOS]


def _is_given(of: Mapping[str, Any]) -> bool:
    return bool(_amounts(of, "requests") or _amounts(of, "limits"))


def _requested(container: Mapping[str, Any], name: str) -> Fraction:
    """Return what a container requests. As in the API server, this is its limit if it sets no request."""
    return _amount(container, "requests" if name in _amounts(container, "requests") else "limits", name)


def _amount(of: Mapping[str, Any], kind: str, name: str) -> Fraction:
    """Return the amount; 0 if none is given, because Kubernetes treats both the same."""
    value = _amounts(of, kind).get(name)
    return Fraction(0) if value is None else quantity(value)


def _amounts(of: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    resources = of.get("resources") or {}
    found = (resources.get(kind) or {}) if isinstance(resources, dict) else resources
    if not isinstance(found, dict):
        raise ValueError("it is not an object")
    return found

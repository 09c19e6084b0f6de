"""Compute what a pod requests from a node, as the scheduler counts it. Pure.

This follows PodRequests of Kubernetes: https://github.com/kubernetes/component-helpers/blob/master/resource/helpers.go
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from supervisor.admission.resources import quantity

PODS = "pods"  # a node also limits the number of its pods
CPU = "cpu"  # in thousandths of a core; everything else is in the units of its resource

Requests = Mapping[str, int]


def requests_of(pod: Mapping[str, Any]) -> dict[str, int]:
    """Return the requests of a valid pod, which also takes one of the node's `PODS`.

    Init containers run one after another, so only the largest is counted, together with the sidecars that
    were started before it. If a container has more than it requests, as during a resize, the larger amount is
    counted.
    """
    spec, status = pod.get("spec") or {}, pod.get("status") or {}
    given = {each.get("name"): each for each in status.get("containerStatuses") or ()}
    given |= {each.get("name"): each for each in status.get("initContainerStatuses") or ()}
    total = _sum(_of_container(each, given) for each in spec.get("containers") or ())
    sidecars: Counter[str] = Counter()
    most: dict[str, int] = {}
    for each in spec.get("initContainers") or ():
        own = _of_container(each, given)
        if each.get("restartPolicy") == "Always":
            sidecars.update(own)
            own = {}
        most = _largest(most, _sum((sidecars, own)))
    total.update(sidecars)
    found = _largest(total, most)
    # Requests of the pod as a whole replace the sum of its containers' requests.
    found |= amounts((spec.get("resources") or {}).get("requests"))
    result = _sum((found, amounts(spec.get("overhead"))))
    result[PODS] = 1
    return dict(result)


def amounts(found: Mapping[str, Any] | None) -> dict[str, int]:
    """Return a list of resources, such as a node's `allocatable`, in whole units."""
    return {name: _amount(name == CPU, str(text)) for name, text in (found or {}).items()}


def _of_container(container: Mapping[str, Any], given: Mapping[Any, Mapping[str, Any]]) -> dict[str, int]:
    state = given.get(container.get("name")) or {}
    actual = ((state.get("resources") or {}).get("requests"), state.get("allocatedResources"))
    found = amounts((container.get("resources") or {}).get("requests"))
    for each in actual:
        found = _largest(found, amounts(each))
    return found


def _sum(parts: Iterable[Requests]) -> Counter[str]:
    total: Counter[str] = Counter()
    for each in parts:
        total.update(each)
    return total


def _largest(one: Requests, other: Requests) -> dict[str, int]:
    return {name: max(one.get(name, 0), other.get(name, 0)) for name in (*one, *other)}


@lru_cache(maxsize=4096)
def _amount(is_cpu: bool, text: str) -> int:
    try:
        return math.ceil(quantity(text) * (1000 if is_cpu else 1))
    # the API server accepts no such quantity, but if one appears, it must not stop the supervisor
    except ValueError:
        return 0

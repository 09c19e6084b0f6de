"""Compare a pod's tolerations with the taints of nodes, as Kubernetes does. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

MAX_TOLERATIONS = 16  # of one pod; later ones are ignored


class Toleration(NamedTuple):
    """A toleration of a pod. `seconds` is None if the pod tolerates the taint forever."""

    key: str = ""
    operator: str = "Equal"
    value: str = ""
    effect: str = ""
    seconds: float | None = None

    def tolerates(self, taint: Mapping[str, Any]) -> bool:
        """True if this toleration matches the taint, as Kubernetes compares them."""
        if self.effect and self.effect != taint.get("effect"):
            return False
        if self.key and self.key != taint.get("key"):
            return False
        if self.operator == "Exists":
            return True
        return bool(self.key) and self.value == (taint.get("value") or "")


@lru_cache(maxsize=1024)
def _known(*given: object) -> Toleration:
    """Return one object for equal tolerations, because most pods have the same tolerations."""
    key, operator, value, effect, seconds = given
    return Toleration(
        str(key or ""),
        str(operator or "Equal"),
        str(value or ""),
        str(effect or ""),
        float(seconds) if type(seconds) is int else None,
    )


_FIELDS = ("key", "operator", "value", "effect", "tolerationSeconds")


def tolerations_of(spec: Mapping[str, Any]) -> tuple[Toleration, ...]:
    """Return the tolerations in the spec of a valid pod."""
    found = list(spec.get("tolerations") or ())[:MAX_TOLERATIONS]
    return tuple(_known(*(each.get(field) for field in _FIELDS)) for each in found)

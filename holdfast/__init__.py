"""Keep distributed PyTorch training running through faults."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.version import __version__

if TYPE_CHECKING:
    from holdfast.errors import BadInput, Fenced, HoldfastError, NumericFault, PeerLost, Uncommitted
    from holdfast.training.batches import Batches
    from holdfast.training.rank import device, local_rank
    from holdfast.training.session import Session, join
    from holdfast.training.state import State

__all__ = [
    "BadInput",
    "Batches",
    "Fenced",
    "HoldfastError",
    "NumericFault",
    "PeerLost",
    "Session",
    "State",
    "Uncommitted",
    "__version__",
    "device",
    "join",
    "local_rank",
]

_MODULES = {
    "holdfast.training.batches": ("Batches",),
    "holdfast.errors": (
        "BadInput",
        "Fenced",
        "HoldfastError",
        "NumericFault",
        "PeerLost",
        "Uncommitted",
    ),
    "holdfast.training.rank": ("device", "local_rank"),
    "holdfast.training.session": ("Session", "join"),
    "holdfast.training.state": ("State",),
}


def __getattr__(name: str) -> Any:
    """Import the module of a public name when a script first uses the name.

    The import is lazy because every Holdfast command imports this file, but needs none of these modules.
    """
    import importlib

    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    if name in ("protect", "rank", "world_size", "generation"):
        raise AttributeError(f"holdfast.{name}: write session = holdfast.join(), then session.{name}")
    if name in ("steps", "commit", "pause", "step"):
        raise AttributeError(f"holdfast.{name}: write state = session.protect(...), then state.{name}")
    raise AttributeError(f"module 'holdfast' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)

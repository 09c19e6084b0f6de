"""Explain what to do about objects that Holdfast cannot protect, and changes that it cannot restore."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.errors import type_with_article
from holdfast.state.random_state import is_generator_state

ADDED_GROUP = (
    "a group that is added during the run can be recreated only if all its parameters belong to a"
    " protected module and require a gradient when protect is called. Add all groups before protect, with"
    " lr=0 until they are trained"
)


def unprotectable(name: str, value: Any) -> str:
    """Return a message that says what to pass to `protect` instead of `value`, which it cannot protect."""
    name_of = type(value).__name__
    if name_of in ("DistributedSampler", "DataLoader"):
        return (
            f"protect({name}=...): a {name_of} does not record its position in the data: use "
            "holdfast.Batches(dataset, batch_size, session, state), which begins at state.step "
            '(see "Epochs and DataLoader" in the user guide), and do not protect it'
        )
    return (
        f"protect({name}=...): the type {name_of} has no state_dict or no load_state_dict: "
        "pass a module, an optimizer, a scheduler, or an object that has both"
    )


def shared_generator(name: str) -> str:
    """Return a warning about the object `name`, whose state contains both tensors and a generator's state.

    Holdfast assumes that such an object is the same on all ranks. This is wrong if each rank has its own
    generator.
    """
    return (
        f"{name} has the state of a torch.Generator as well as tensors, so Holdfast assumes that it is the"
        " same on all ranks, and a restart copies one rank's state to all. If each rank has its own"
        " generator, set holdfast_private = True on it and make state_dict() return .tolist() of the"
        " tensors; otherwise, set holdfast_private = False"
    )


def frozen_parameters(names: list[str], step: int) -> str:
    """Return a warning about parameters that are frozen now but were not at `step`, where the run resumes."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return (
        f"{names[0]}{more}: requires_grad was True at step {step}, but the script set it to False when it"
        " started. It stays False, because DDP does not reduce gradients of parameters that were frozen"
        " when DDP was constructed. Set it to True before DDP is constructed, under `if state.step >= N:`,"
        " where N is the step of the change"
    )


def not_json(states: Mapping[str, Any]) -> str:
    """Return a message that names the first value in `states` that JSON cannot represent."""
    for name, state in states.items():
        found = _first_not_json(state, name)
        if found is not None:
            path, value = found
            return (
                f"{path} is {type_with_article(value)}: state that is private to a rank must be JSON "
                "(numbers, strings, lists, dicts). Make state_dict() return a list, or None, instead"
            )
    return "state that is private to a rank must be JSON"


def _first_not_json(value: Any, path: str) -> tuple[str, Any] | None:
    if value is None or isinstance(value, (bool, int, float, str)):
        return None
    if isinstance(value, Mapping):
        bad = next((key for key in value if not isinstance(key, (str, int, float, bool, type(None)))), None)
        if bad is not None:
            return f"{path}: the key {bad!r}", bad
        below = (_first_not_json(each, f"{path}[{key!r}]") for key, each in value.items())
    elif isinstance(value, (list, tuple)):
        below = (_first_not_json(each, f"{path}[{at}]") for at, each in enumerate(value))
    else:
        return None if is_generator_state(value) else (path, value)
    return next((each for each in below if each is not None), None)

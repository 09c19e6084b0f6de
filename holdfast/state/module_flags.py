"""Save and restore the flags that a script changes in a model during training.

The flags are each parameter's `requires_grad`, and the mode of each submodule whose mode differs from the
mode of the whole model, for example after `bn.eval()` in a model in training mode. A script sets its initial
flags whenever it starts, but after a restart it does not repeat the changes from earlier steps. So every flag
that has changed since the loop began is saved, with its value at the last commit.

The mode of the whole model is not saved, because scripts set it before each pass. If the model is in `eval()`
mode at a commit, the script is evaluating the model, so the submodules' modes at the previous commit are
kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from holdfast.errors import BadInput
from holdfast.state.capture import unwrap

if TYPE_CHECKING:
    import torch

FLAGS_KEY = "holdfast.flags"  # the key in a snapshot's document; absent until a flag has changed
_LEARNS, _TRAINS = "requires_grad", "training"
_learns, _trains = attrgetter(_LEARNS), attrgetter(_TRAINS)

_Known = dict[str, bool]


class ModuleFlags:
    """Saves and restores the flags of the protected modules, given by name."""

    def __init__(self, modules: Mapping[str, Any]) -> None:
        self._modules = {name: unwrap(module) for name, module in modules.items()}
        self._restored: Mapping[str, Any] = {}
        self._trackers: dict[str, _FlagTracker] | None = None  # None: no loop has begun
        self._document: dict[str, Any] = {}

    def document(self) -> Mapping[str, Any]:
        """Return the document's entry `FLAGS_KEY` from the last commit; empty if no flag has changed.

        Any thread may call this.
        """
        return self._document

    def restore(self, document: Mapping[str, Any]) -> None:
        """Take the flags from a snapshot's document; `begin` applies them.

        Raises BadInput if the entry `FLAGS_KEY` is invalid.
        """
        found = document.get(FLAGS_KEY, {})
        if not isinstance(found, dict) or not all(map(_is_known, found.values())):
            raise BadInput(f"{FLAGS_KEY} of the snapshot is not a table of flags")
        self._restored = found
        self._document = {FLAGS_KEY: found} if found else {}

    def begin(self) -> list[str]:
        """At the beginning of the loop, replace the flags that the script has set with the restored flags.

        Only the first call has an effect. Returns the parameters that remain frozen although they were
        trainable in the snapshot. They remain frozen because the script has already constructed DDP, which
        does not reduce the gradients of parameters that were frozen at that time.
        """
        if self._trackers is not None:
            return []
        self._trackers = {name: _FlagTracker(module) for name, module in self._modules.items()}
        left = []
        for name, tracker in self._trackers.items():
            known = self._restored.get(name, {})
            frozen = tracker.put_back(known.get(_LEARNS, {}), known.get(_TRAINS, {}))
            left += [f"{name}.{key}" for key in frozen]
        self._describe()
        return left

    def commit(self) -> bool:
        """Add the flags that changed in this step to the state that is being committed.

        Returns whether any have changed.
        """
        # Build a list first, because with a generator, `any` would stop at the first change and skip the
        # other trackers.
        changes = [tracker.record_changes() for tracker in (self._trackers or {}).values()]
        if any(changes):
            self._describe()
        return any(changes)

    def _describe(self) -> None:
        found = {
            name: known for name, tracker in (self._trackers or {}).items() if (known := tracker.known())
        }
        self._document = {FLAGS_KEY: found} if found else {}


class _FlagTracker:
    """Tracks the flags of one module: their values when the loop began, and the changes since then."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._top = module
        self._names, self._parameters = _split(module.named_parameters())
        self._paths, self._parts = _split(module.named_modules())
        self._learned = self._last_learned = list(map(_learns, self._parameters))
        # For each submodule, whether it has the mode of the whole model.
        self._trained = self._last_trained = [each.training == module.training for each in self._parts]
        self._learning: _Known = {}
        self._training: _Known = {}

    def put_back(self, learning: Mapping[str, bool], training: Mapping[str, bool]) -> list[str]:
        """Apply saved flags; return the parameters that are frozen now but were not when they were saved."""
        left = []
        for name, parameter in zip(self._names, self._parameters, strict=True):
            if name in learning:
                if parameter.requires_grad and not learning[name]:
                    parameter.requires_grad_(False)
                elif learning[name] and not parameter.requires_grad:
                    left.append(name)
                self._learning[name] = parameter.requires_grad
        self._last_learned = list(map(_learns, self._parameters))
        for path, part in zip(self._paths, self._parts, strict=True):
            if path in training and path:
                self._training[path] = training[path]
                if self._top.training:
                    part.training = training[path]
        self._last_trained = []  # makes the next commit record the modes, even if none has changed
        return left

    def record_changes(self) -> bool:
        """Record the flags that have changed since the last call. Return whether any have changed."""
        changed = False
        if (now := list(map(_learns, self._parameters))) != self._last_learned:
            self._last_learned, changed = now, True
            _update(self._learning, self._names, now, self._learned)
        if self._top.training and (now := list(map(_trains, self._parts))) != self._last_trained:
            self._last_trained, changed = now, True
            _update(self._training, self._paths, now, self._trained)
        return changed

    def known(self) -> dict[str, _Known]:
        """Return the changed flags by kind. These are copies, because another thread may encode them."""
        both = {_LEARNS: self._learning, _TRAINS: self._training}
        return {kind: dict(found) for kind, found in both.items() if found}


def _split(pairs: Any) -> tuple[list[str], list[Any]]:
    found = list(pairs)
    return [name for name, _ in found], [each for _, each in found]


def _update(known: _Known, names: list[str], now: list[bool], then: list[bool]) -> None:
    """Update `known` with each current flag that differs from `then` or that `known` already contains."""
    known.update(
        {name: is_ for name, is_, was in zip(names, now, then, strict=True) if is_ != was or name in known}
    )


def _is_known(found: object) -> bool:
    return isinstance(found, dict) and all(
        isinstance(each, dict) and all(type(value) is bool for value in each.values())
        for each in found.values()
    )

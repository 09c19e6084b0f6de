"""What a script switches on and off in a model as it trains: which parameters learn, which parts do.

`requires_grad` of parameters, and of modules whether they are in the mode of the whole model (`bn.eval()` in
a model that trains). A script sets them each time it starts, but for what it does in a step, to which no
restart comes back. So only what has changed since the loop began is kept, as it was at the last commit.

The mode of the whole model is not kept: scripts set it before their passes. Where it is `eval()` at a commit,
that is an evaluation, and the modes of the parts are those of the commit before.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from holdfast.errors import BadInput
from holdfast.state.capture import unwrap

if TYPE_CHECKING:
    import torch

FLAGS_KEY = "holdfast.flags"  # of the document, absent while nothing has changed
_LEARNS, _TRAINS = "requires_grad", "training"
_learns, _trains = attrgetter(_LEARNS), attrgetter(_TRAINS)

_Known = dict[str, bool]


class ModuleFlags:
    """The flags of protected modules, by the modules' names."""

    def __init__(self, modules: Mapping[str, Any]) -> None:
        self._modules = {name: unwrap(module) for name, module in modules.items()}
        self._restored: Mapping[str, Any] = {}
        self._looks: dict[str, _Look] | None = None  # None: no loop has begun
        self._document: dict[str, Any] = {}

    def document(self) -> Mapping[str, Any]:
        """Return the entry `FLAGS_KEY` as of the last commit, or nothing. Any thread may call it."""
        return self._document

    def restore(self, document: Mapping[str, Any]) -> None:
        """Take what a snapshot's document has, to be put back by `begin`. Raises BadInput."""
        found = document.get(FLAGS_KEY, {})
        if not isinstance(found, dict) or not all(map(_is_known, found.values())):
            raise BadInput(f"{FLAGS_KEY} of the snapshot is not of flags by names")
        self._restored = found
        self._document = {FLAGS_KEY: found} if found else {}

    def begin(self) -> list[str]:
        """The script is about to train: put back what was restored, over what it has set by now.

        Once; after that it does nothing. Returns the parameters that were not put back: they learned, and
        here they do not. DDP, which the script has made by now, reduces no gradients of what was frozen
        then.
        """
        if self._looks is not None:
            return []
        self._looks = {name: _Look(module) for name, module in self._modules.items()}
        left = []
        for name, look in self._looks.items():
            known = self._restored.get(name, {})
            left += [f"{name}.{key}" for key in look.put_back(known.get(_LEARNS, {}), known.get(_TRAINS, {}))]
        self._describe()
        return left

    def commit(self) -> None:
        """A step is done: what has changed in it is part of its state."""
        changes = [look.changes() for look in (self._looks or {}).values()]  # each is to be asked
        if any(changes):
            self._describe()

    def _describe(self) -> None:
        found = {name: known for name, look in (self._looks or {}).items() if (known := look.known())}
        self._document = {FLAGS_KEY: found} if found else {}


class _Look:
    """One module: what its flags were when the loop began, and those that have been others since."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._top = module
        self._names, self._parameters = _split(module.named_parameters())
        self._paths, self._parts = _split(module.named_modules())
        self._learned = self._last_learned = list(map(_learns, self._parameters))
        # Whether they are in the mode of the whole.
        self._trained = self._last_trained = [each.training == module.training for each in self._parts]
        self._learning: _Known = {}
        self._training: _Known = {}

    def put_back(self, learning: Mapping[str, bool], training: Mapping[str, bool]) -> list[str]:
        """Set what was kept; return the parameters that are frozen here and were not."""
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
        self._last_trained = []  # the script may undo it, or set the mode of the whole first
        return left

    def changes(self) -> bool:
        """Say whether a flag is another one than when this was asked last."""
        changed = False
        if (now := list(map(_learns, self._parameters))) != self._last_learned:
            self._last_learned, changed = now, True
            _note(self._learning, self._names, now, self._learned)
        if self._top.training and (now := list(map(_trains, self._parts))) != self._last_trained:
            self._last_trained, changed = now, True
            _note(self._training, self._paths, now, self._trained)
        return changed

    def known(self) -> dict[str, _Known]:
        """Return what has changed, and copies of it: another thread may write it down."""
        both = {_LEARNS: self._learning, _TRAINS: self._training}
        return {kind: dict(found) for kind, found in both.items() if found}


def _split(pairs: Any) -> tuple[list[str], list[Any]]:
    found = list(pairs)
    return [name for name, _ in found], [each for _, each in found]


def _note(known: _Known, names: list[str], now: list[bool], then: list[bool]) -> None:
    """Write down those that are other than `then`, and those that once were."""
    known.update(
        {name: is_ for name, is_, was in zip(names, now, then, strict=True) if is_ != was or name in known}
    )


def _is_known(found: object) -> bool:
    return isinstance(found, dict) and all(
        isinstance(each, dict) and all(type(value) is bool for value in each.values())
        for each in found.values()
    )

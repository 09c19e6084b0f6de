"""What the replicated state looked like at the last commit, and what was written into it since then.

A copy that is made later than the commit has the state of that step only if nothing was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from holdfast.state.change_detection import ChangeDetector, Footprint
from holdfast.state.device import Device
from holdfast.training.protection.device_copy import HostPart, TensorSplit

LOOK_CLOSELY = 4  # the first steps of a generation, in which changes are looked for more thoroughly


class CommittedState:
    """The footprint of the last commit, and how many steps this generation has committed.

    The script's thread records; the listener's thread compares, too.
    """

    def __init__(self, replicated: Mapping[str, Any], device: Device, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self.footprints = ChangeDetector(replicated, device.holds)
        self.footprint: Footprint | None = None
        self.steps_done = 0  # in this generation
        self._tails_done = 0  # `steps_done` when the work after a commit was last over
        self._searches = True  # look for other parameters at the next footprint
        self._compared: TensorSplit | None = None  # its tensors are known to be those of the footprint

    @property
    def step(self) -> int:
        """The step of the last commit; -1 before there was one, or a state to begin with."""
        return -1 if self.footprint is None else self.footprint.step

    @property
    def in_tail(self) -> bool:
        """True from a commit until the work that the script does after it is over."""
        return self.steps_done > self._tails_done

    def tail_is_over(self) -> None:
        """The script's work after the last commit is over."""
        self._tails_done = self.steps_done

    def search_parameters(self) -> None:
        """Look for other parameters when the next footprint is taken."""
        self._searches = True

    def record(self, step: int) -> None:
        """Remember what the state of `step` looks like: a copy that is made later must find it so."""
        self.footprint = self.footprints.take(step, self._searches)
        self._searches = False
        for name in self.footprints.unseen:
            self._warn(
                f"the state_dict() of {name} gives copies of its tensors, so a change after commit() is not"
                f" noticed, and is lost by a fault: change {name} before commit()"
            )

    def changed(self, since: Footprint | None = None) -> str | None:
        """Return what was written into the state since it was committed; None when nothing was."""
        since = since or self.footprint
        what = None if since is None else self.footprints.moved(since)
        return None if what is None or since is None else f"{what} after the commit of step {since.step}"

    def is_as_committed(self, part: HostPart) -> bool:
        """True when the host's objects, of which `part` is a copy, are as they were at the commit."""
        if (since := self.footprint) is None:
            return True
        known = part.division is self._compared  # the same tensors as in the last step
        look = self.footprints.quickly_moved if known else self.footprints.moved
        if look(since) is not None:
            return False
        self._compared = part.division
        return True

"""Keep the footprint of the replicated state at the last commit, and detect changes since then.

A copy made after a commit has that step's state only if nothing has changed since.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from holdfast.state.change_detection import ChangeDetector, Footprint
from holdfast.state.device import Device
from holdfast.training.protection.device_copy import HostPart, TensorSplit

# Each commit notices if a trained parameter was moved, but only a search finds all other replaced tensors.
# Until then no copy is possible, because a tensor may have been replaced after the commit.
SEARCH_EVERY = 16  # steps
LOOK_CLOSELY = 4  # up to this many steps into a generation, the search for changes is more thorough


class CommittedState:
    """Keeps the footprint of the last commit, and counts the steps that this generation has committed.

    Only the script's thread records footprints. Both that thread and the listener's thread compare the state
    with them.
    """

    def __init__(self, replicated: Mapping[str, Any], device: Device, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self.footprints = ChangeDetector(replicated, device.holds)
        self.footprint: Footprint | None = None
        self.steps_done = 0  # the steps that were committed in this generation
        self._tails_done = 0  # the value of `steps_done` at the end of the last tail
        self._searches = True  # whether the next footprint searches for added or replaced parameters
        self._collected: object = None  # the list of tensors that the last snapshot collected
        # A `TensorSplit` whose tensors are known to be the tensors of a footprint.
        self._compared: TensorSplit | None = None

    @property
    def step(self) -> int:
        """The step of the last footprint, at a commit or of the initial state; -1 if there is none."""
        return -1 if self.footprint is None else self.footprint.step

    @property
    def in_tail(self) -> bool:
        """True from a commit until the end of the script's work after that commit."""
        return self.steps_done > self._tails_done

    def tail_is_over(self) -> None:
        """Record that the script's work after the last commit has ended."""
        self._tails_done = self.steps_done

    def search_parameters(self) -> None:
        """Make the next footprint search for added or replaced parameters."""
        self._searches = True

    def collected(self, tensors: object) -> None:
        """Make the next footprint search for parameters, unless the last snapshot was of the same `tensors`.

        `tensors` is the list that `CachedCollector.collect` returned for the snapshot. If it is the same
        object as for the snapshot before, the collector has just compared the same tables as a search would.
        """
        if tensors is not self._collected or not self.footprints.finds_as_collector:
            self._collected = tensors
            self._searches = True

    def record(self, step: int) -> None:
        """Take the footprint of the state of `step`, with which later copies are compared."""
        searches, self._searches = self._searches or step % SEARCH_EVERY == 0, False
        self.footprint = self.footprints.footprint(step, searches)
        for name in self.footprints.unseen:
            self._warn(
                f"the state_dict() of {name} returns copies of its tensors, so Holdfast cannot detect a"
                f" change after commit(), and a fault loses it: change {name} before commit()"
            )

    def changed(self, since: Footprint | None = None) -> str | None:
        """Describe what has changed in the state since its commit; return None if nothing has changed."""
        since = since or self.footprint
        what = None if since is None else self.footprints.first_change(since)
        if what is None or since is None:
            return None
        self._searches = True  # a tensor that an earlier step has replaced then prevents no further copy
        return f"{what} after the commit of step {since.step}"

    def is_as_committed(self, part: HostPart) -> bool:
        """Return True if the host's objects have not changed since the commit. `part` is a copy of them."""
        if (since := self.footprint) is None:
            return True
        known = part.division is self._compared  # the tensors have already been compared with a footprint
        find_change = self.footprints.sampled_change if known else self.footprints.first_change
        if find_change(since) is not None:
            self._searches = True  # as in `changed`
            return False
        self._compared = part.division
        return True

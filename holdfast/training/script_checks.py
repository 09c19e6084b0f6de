"""Look, at each commit, for what scripts get wrong around protected state, and warn of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from holdfast.state import misuse
from holdfast.state.device import Device
from holdfast.training.rank import Rank
from holdfast.worker.thread_frames import BackgroundThreads


class ScriptChecks:
    """One rank's checks. Each warns once of one thing; none of them changes what is done about a step."""

    def __init__(self, rank: Rank, modules: Iterable[Any], optimizers: Sequence[Any], device: Device) -> None:
        """Watch the first step from here on, also what the script does before the state is restored."""
        self._rank, self._modules, self._optimizers = rank, tuple(modules), optimizers
        self._unprotected: misuse.UnprotectedTraining | None = misuse.UnprotectedTraining(
            self._modules, optimizers, self._warn
        )
        self._accumulated = misuse.AccumulatedGradients(self._modules, device, self._warn)
        self._added: misuse.AddedGroups
        self._schedulers: misuse.UnprotectedSchedulers
        self._threads: BackgroundThreads

    def begin(self, objects: Mapping[str, Any]) -> None:
        """Take the groups, the rates and the threads as they are now, when `objects` have been restored."""
        self._added = misuse.AddedGroups(self._modules, self._optimizers, self._warn)
        self._schedulers = misuse.UnprotectedSchedulers(self._optimizers, objects, self._warn)
        self._threads = BackgroundThreads(lambda text: misuse.warn(0, text))  # any rank: one may save alone

    # -- in the order of a commit

    def warn_of_unprotected(self) -> bool:
        """Warn, at the first commit, of what trains without protection; return True if anything does.

        Before all other checks: what they find may come of it.
        """
        unprotected, self._unprotected = self._unprotected, None
        return unprotected is not None and unprotected.settle()

    def look(self, step: int) -> None:
        """Warn of added groups, schedulers that are not protected, and gradients added to over a commit."""
        self._added.look(step)
        self._schedulers.look()
        self._accumulated.look()

    def watch_gradients(self) -> None:
        """No optimizer has stepped in the step that is being committed: see whether the next adds to it."""
        self._accumulated.watch()

    def look_at_threads(self) -> None:
        """Warn of threads of the script that work beside the steps."""
        self._threads.look()

    def forked(self) -> None:
        """This process is one that the script forked: its first step is not the rank's."""
        self._unprotected = None

    def _warn(self, text: str) -> None:
        misuse.warn(self._rank.number, text)

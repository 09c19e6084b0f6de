"""Check at each commit for common mistakes in how a script handles protected state, and warn of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from holdfast.state.device import Device
from holdfast.training.misuse import unprotected
from holdfast.training.misuse.accumulated_gradients import AccumulatedGradients
from holdfast.training.rank import Rank, print_warning
from holdfast.worker.thread_frames import BackgroundThreads


class ScriptChecks:
    """One rank's checks. Each check warns once of one kind of mistake. They do not affect the step."""

    def __init__(self, rank: Rank, modules: Iterable[Any], optimizers: Sequence[Any], device: Device) -> None:
        """Start watching the first step, including what the script does before the state is restored."""
        self._rank, self._modules, self._optimizers = rank, tuple(modules), optimizers
        self._unprotected: unprotected.UnprotectedTraining | None = unprotected.UnprotectedTraining(
            self._modules, optimizers, rank.warn
        )
        self._accumulated = AccumulatedGradients(self._modules, device, rank.warn)
        self._added: unprotected.AddedGroups
        self._schedulers: unprotected.UnprotectedSchedulers
        self._threads: BackgroundThreads

    def begin(self, objects: Mapping[str, Any]) -> None:
        """Start checking parameter groups, schedulers and threads. Call this once `objects` are restored."""
        self._added = unprotected.AddedGroups(self._modules, self._optimizers, self._rank.warn)
        self._schedulers = unprotected.UnprotectedSchedulers(self._optimizers, objects, self._rank.warn)
        self._threads = BackgroundThreads(print_warning)  # printed on every rank

    # -- in the order of a commit

    def warn_of_unprotected(self) -> bool:
        """At the first commit, warn of unprotected training; return True if there was a warning.

        Unprotected training means that an unprotected optimizer steps, or that unprotected parameters are
        trained. Call this before all other checks, because an unprotected object may be the cause of their
        findings.
        """
        unprotected, self._unprotected = self._unprotected, None
        return unprotected is not None and unprotected.finish()

    def check(self, step: int) -> None:
        """Warn of added parameter groups, unprotected schedulers, and gradients added up across commits."""
        self._added.check(step)
        self._schedulers.check()
        self._accumulated.check()

    def watch_gradients(self) -> None:
        """Watch whether the next step adds to the gradients. Call this if no optimizer has stepped."""
        self._accumulated.watch()

    def check_threads(self) -> None:
        """Warn of threads of the script that are working while the script commits a step."""
        self._threads.check()

    def forked(self) -> None:
        """Stop watching the first step in a forked process, because its steps are not the rank's steps."""
        self._unprotected = None

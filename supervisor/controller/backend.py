"""The interface of what creates a job's members: `holdfast run` on one machine, pods on a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from supervisor.view.model import Completion


class Backend(Protocol):
    """Makes sure that so many members exist. All calls are wishes and may be repeated."""

    @property
    def members(self) -> Mapping[str, str]:
        """Name -> state ("running") of the members that exist."""

    @property
    def stop(self) -> str:
        """What the user asked of the run: see `JobState.stop`."""

    @property
    def volume_error(self) -> str:
        """Why what the members have in memory cannot be used; "" when it can."""

    def want(self, count: int, discard: tuple[str, ...]) -> None:
        """See to it that `count` members exist besides those in `discard`, which are to go."""

    def kill(self, member: str) -> None:
        """Power loss, for drills: the member and its memory are gone at once."""

    def renew(self, member: str) -> None:
        """See whether the sidecar of a member is stopped or stuck, and have another take its place if so."""

    def stop_asked(self, how: str) -> None:
        """Say that the user asked the supervisor itself for an end: "graceful" or "now"."""

    def finish(self, exit_code: int, why: str, message: str, completion: Completion | None) -> None:
        """Report to the process that waits for the run how it ended.

        `why` is the whole sentence, `finish` its parts if the script has finished and they are known.
        """

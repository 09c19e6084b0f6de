"""The interface to the component that creates a run's members: a keeper, or the owner of their pods."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

from supervisor.view.model import Completion, Departure, StopRequest


class Backend(Protocol):
    """Maintains the requested number of members.

    All calls are requests: they return before they are carried out, and are safe to repeat.
    """

    @property
    def members(self) -> Collection[str]:
        """The members that exist, in order. A test for one of them takes constant time."""

    @property
    def departures(self) -> Mapping[str, Departure]:
        """The members that are about to end.

        A member whose departure has begun may be missing from `members` although it still exists.
        """

    @property
    def stop(self) -> StopRequest:
        """The user's request to stop the run; "" if there is none. See `JobState.stop`."""

    @property
    def volume_error(self) -> str:
        """The reason why the states in the members' memory cannot be used; "" if they can."""

    def want(self, count: int, discard: tuple[str, ...]) -> None:
        """Request `count` members, not counting those in `discard`, which are removed."""

    def end_member(self, member: str) -> None:
        """End a member's processes and remove its memory, with the same effect as a power loss."""

    def renew(self, member: str) -> None:
        """Check the sidecar of a member, and replace it if it is stopped or stuck."""

    def record_stop(self, how: StopRequest) -> None:
        """Record that the user asked the supervisor to stop the run, "graceful" or "now"."""

    def finish(self, exit_code: int, why: str, message: str, completion: Completion | None) -> None:
        """Report how the run ended to the process that waits for it.

        `why` is a complete sentence. `completion` contains its parts if the script has finished and the parts
        are known.
        """

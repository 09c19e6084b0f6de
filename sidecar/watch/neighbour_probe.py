"""Find out which neighbours this member can no longer reach, while its ranks are held up.

A member may be cut off from the others although the supervisor reaches all of them: the ranks then wait for
each other, and no inspection of processes shows why. The sidecars of the neighbours listen on the addresses
that the ranks use, so a connection to one of them shows that packets arrive. The kernel accepts it, even if
that sidecar is stopped for a while.

A network policy may allow the connections of the ranks but not those of the sidecars. So a neighbour can be
considered out of reach only if this sidecar has reached it before, or if the supervisor names it as one that
must be reached, for example because it is new in the group. But if this sidecar reached no neighbour in an
earlier generation, such a policy is likely, and no neighbour is considered out of reach. The exception is a
neighbour that itself reports this member: it has reached this member before, so the policy allows that, and
this sidecar may simply be new.
"""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Collection, Sequence
from urllib.parse import urlsplit

PERIOD_S = 1.0  # the time between two attempts to reach a neighbour
CONNECT_S = 1.5  # the limit for one attempt; the kernel sends a lost packet again after a second
LATE_S = 0.5  # an attempt that overruns the limit by this much shows only that this process did not run
MISSES = 3  # this many failed attempts in a row show that a neighbour is out of reach
GAP_S = 5.0  # attempts that are further apart are not considered to be in a row
STARTED_S = 5.0  # the neighbours of ranks that have not completed a step are probed after this time
FIRST_S = 10.0  # the time between two attempts to reach a neighbour for the first time while nothing is wrong
MAX_REACHED = 256
# No packet came back, or there is no route to the host. Other errors have their cause on this host.
_NO_WAY = frozenset({errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EINVAL})


class NeighbourProbe:
    """Attempts to reach the neighbours. `unreached` contains the URLs that can no longer be reached."""

    def __init__(self) -> None:
        self.unreached: tuple[str, ...] = ()
        self._misses: dict[str, int] = {}
        self._unreached_s: dict[str, float] = {}  # since when each neighbour has been out of reach
        self._last_s = 0.0  # when the last attempt began
        self._reached: set[str] = set()  # the neighbours that it has ever reached
        # whether it has attempted to reach a neighbour that need not be reached: ever, and in an earlier
        # generation
        self._tried = self._tried_before = False
        self._generation = 0
        self._began_s = 0.0  # when the newest generation was first seen
        self._next_s = 0.0
        self._was_held_up = False

    def take_turn(
        self, generation: int, neighbours: Sequence[str], now_s: float, *, is_late: bool, settled: bool
    ) -> bool:
        """Return True if the caller must probe the neighbours now; the next turn is then a period later.

        Forget the results if nothing holds up the ranks.

        Args:
            generation: The generation of the ranks.
            neighbours: () unless the ranks run.
            is_late: Whether a rank of this member is late.
            settled: Whether the generation has completed a step.
        """
        if generation != self._generation:
            self._generation, self._began_s, self._next_s = generation, now_s, now_s
            self._tried_before = self._tried
            self._forget()
        is_held_up = bool(neighbours) and (is_late or (not settled and now_s - self._began_s >= STARTED_S))
        if not is_held_up:
            self._forget()
        elif not self._was_held_up:
            self._next_s = now_s
        self._was_held_up = is_held_up
        if now_s < self._next_s or not (is_held_up or set(neighbours) - self._reached):
            return False
        self._next_s = now_s + (PERIOD_S if is_held_up else FIRST_S)
        return True

    @property
    def unreached_s(self) -> float:
        """How long attempts have shown that all of `unreached` are out of reach; 0.0 if there are none.

        The time since the last attempt is not included, because this process may have been stopped.
        """
        return self._last_s - max(self._unreached_s[url] for url in self.unreached) if self.unreached else 0.0

    def _forget(self) -> None:
        self.unreached, self._misses, self._unreached_s = (), {}, {}

    async def probe(
        self,
        neighbours: Sequence[str],
        now_s: float,
        must_reach: Collection[str] = (),
        must_confirm: Collection[str] = (),
    ) -> None:
        """Attempt to reach each neighbour once, and update `unreached`.

        Neighbours in `must_reach` can be out of reach even if they have never been reached, unless earlier
        generations had neighbours and none of those was ever reached either. Those in `must_confirm`, a part
        of `must_reach`, can be out of reach in any case.
        """
        generation = self._generation
        answers = await asyncio.gather(*(_reaches(url) for url in neighbours))
        reached = {url for url, there in zip(neighbours, answers, strict=True) if there}
        if len(self._reached) > MAX_REACHED:
            self._reached.clear()
        self._reached |= reached
        self._tried = self._tried or not set(must_reach).issuperset(neighbours)
        if self._tried_before and not self._reached:
            must_reach = must_confirm
        if generation != self._generation or not self._was_held_up:
            return
        if now_s - self._last_s > GAP_S:
            self._forget()
        self._last_s = now_s
        for url, there in zip(neighbours, answers, strict=True):
            if there is False and (url in self._reached or url in must_reach):
                self._misses[url] = self._misses.get(url, 0) + 1
                if self._misses[url] == MISSES:
                    self._unreached_s[url] = now_s
            else:  # an attempt without a result proves nothing, so the count starts again
                self._misses.pop(url, None)
                self._unreached_s.pop(url, None)
        self.unreached = tuple(url for url in neighbours if url in self._unreached_s)


async def _reaches(url: str) -> bool | None:
    """Return whether the host of `url` answers, even with a refusal; None if that is unknown."""
    began_s = time.monotonic()
    try:
        parts = urlsplit(url)
        if parts.hostname is None or parts.port is None:
            return None
        connecting = asyncio.open_connection(parts.hostname, parts.port)
        _, writer = await asyncio.wait_for(connecting, CONNECT_S)
    except ConnectionRefusedError:
        return True
    except asyncio.TimeoutError:
        return None if time.monotonic() - began_s > CONNECT_S + LATE_S else False
    except OSError as error:
        return False if error.errno in _NO_WAY else None
    except ValueError:
        return None
    writer.transport.abort()
    return True

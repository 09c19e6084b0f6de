"""Find out which other members this member cannot reach, while its ranks are held up.

A member may be cut off from the others although the supervisor reaches all of them: the ranks then wait for
each other, and no inspection of processes shows why. The sidecars of the neighbours listen on the addresses
that the ranks use, so a connection to one of them shows that packets arrive. The host's kernel accepts it,
even if that sidecar is stopped.

A network policy may allow the connections of the ranks but not those of the sidecars. So a sidecar that has
never reached a neighbour reports nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from urllib.parse import urlsplit

PERIOD_S = 1.0  # between two attempts to reach a neighbour
CONNECT_S = 1.5  # the limit for one attempt; the kernel sends a lost packet again after a second
MISSES = 3  # so many failed attempts in a row show that a neighbour is out of reach
STARTED_S = 5.0  # the neighbours of ranks that have not completed a step are probed after this time
FIRST_S = 10.0  # between two attempts to reach a neighbour for the first time, while nothing is wrong


class NeighbourProbe:
    """Attempts to reach the neighbours. `unreached` contains the URLs of those that it cannot reach."""

    def __init__(self) -> None:
        self.unreached: tuple[str, ...] = ()
        self._misses: dict[str, int] = {}
        self._has_reached = False  # whether it has ever reached a neighbour
        self._generation = 0
        self._began_s = 0.0  # when the newest generation was first seen
        self._next_s = 0.0

    def is_due(
        self, generation: int, neighbours: Sequence[str], now_s: float, *, is_late: bool, settled: bool
    ) -> bool:
        """Return True if the neighbours must be probed now. Forget the results if nothing holds up the ranks.

        Args:
            is_late: Whether a rank of this member is late.
            settled: Whether the generation has completed a step.
        """
        if generation != self._generation:
            self._generation, self._began_s, self._next_s = generation, now_s, now_s
            self._forget()
        is_held_up = is_late or (not settled and now_s - self._began_s >= STARTED_S)
        if not is_held_up:
            self._forget()
        if not neighbours or now_s < self._next_s or (self._has_reached and not is_held_up):
            return False
        self._next_s = now_s + (PERIOD_S if is_held_up else FIRST_S)
        return True

    def _forget(self) -> None:
        self.unreached, self._misses = (), {}

    async def probe(self, neighbours: Sequence[str]) -> None:
        """Attempt to reach each neighbour once, and update `unreached`."""
        generation = self._generation
        reached = await asyncio.gather(*(_reaches(url) for url in neighbours))
        self._has_reached = self._has_reached or any(reached)
        if generation != self._generation or not self._has_reached:
            return
        self._misses = {
            url: 0 if there else self._misses.get(url, 0) + 1
            for url, there in zip(neighbours, reached, strict=True)
        }
        self.unreached = tuple(url for url in neighbours if self._misses[url] >= MISSES)


async def _reaches(url: str) -> bool:
    """Return True if the host of `url` answers, even if it refuses the connection, or if `url` is invalid."""
    try:
        parts = urlsplit(url)
        connecting = asyncio.open_connection(parts.hostname, parts.port)
        _, writer = await asyncio.wait_for(connecting, CONNECT_S)
    except (ConnectionRefusedError, ValueError):
        return True
    except (OSError, asyncio.TimeoutError):
        return False
    writer.transport.abort()
    return True

"""Links between members in simulated time, and the sidecars' attempts to reach their neighbours over them.

The attempts are those of the real `NeighbourProbe`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING
from unittest import mock

from sidecar.watch import neighbour_probe
from tests.simulation.cluster.member import MS

if TYPE_CHECKING:
    from holdfast.protocol.member_messages import MemberOrder
    from tests.simulation.cluster.group import Group
    from tests.simulation.cluster.sidecar import Sidecar

TICK_MS, RETRY_MS = 100, 200
ATTEMPT_MS = int(neighbour_probe.CONNECT_S * 1000)
NO_ROUTE = "torch.distributed.DistNetworkError: connect() failed: No route to host"


@dataclass
class Links:
    """The links between members. Ranks that cannot connect fail after `fails_ms`, or wait if that is 0."""

    fails_ms: int = 0
    only_ranks: bool = False  # the sidecars use another network, which works
    only_sidecars: bool = False  # the ranks use another network, which works
    loads_ms: int = 0  # how long ranks take before they connect
    down: set[frozenset[str]] = field(default_factory=set)
    closed: set[str] = field(default_factory=set)  # members that can connect to others, but not vice versa
    stuck: set[str] = field(
        default_factory=set
    )  # members whose sidecars always report the same `unreached_s`
    _held: set[tuple[int, int]] = field(default_factory=set)

    def cut(self, *names: str) -> None:
        """Cut the link between two members, or all links of one."""
        self.down.add(frozenset(names))

    def connect(self, one: str, other: str) -> bool:
        """True if two members reach each other."""
        return one == other or not self.down & {frozenset({one, other}), frozenset({one}), frozenset({other})}

    def reaches(self, one: str, other: str) -> bool:
        """True if the sidecar of `one` can connect to that of `other`."""
        return other not in self.closed and self.connect(one, other)

    def hold_up(self, group: Group, generation: int, step: int, go_on: Callable[[], None]) -> bool:
        """Return True if the ranks cannot exchange data now. `go_on` is then called again, or they fail."""
        if step < 0 and self.loads_ms and (generation, step) not in self._held:
            self._held.add((generation, step))
            group.world.after(self.loads_ms, go_on)
            return True
        if self.only_sidecars or not self._are_apart(group, generation):
            return False
        group.world.after(RETRY_MS, go_on)
        if (generation, step) not in self._held:
            self._held.add((generation, step))
            if self.fails_ms:
                group.world.after(self.fails_ms, partial(self._fail, group, generation))
        return True

    def _are_apart(self, group: Group, generation: int) -> bool:
        """True if a link is missing on the ring of the members, or to the one with rank 0."""
        names = list(dict.fromkeys(rank.member.name for rank in group.ranks(generation)))
        ring = zip(names, (*names[1:], *names[:1]), strict=True)
        if self.closed & set(names):
            return True
        return not all(self.connect(*pair) for pair in (*ring, *((names[0], name) for name in names)))

    def _fail(self, group: Group, generation: int) -> None:
        if self._are_apart(group, generation):
            for rank in group.ranks(generation):
                if rank.state == "running":
                    group.fail(rank, "distributed", NO_ROUTE, 1)


class Prober:
    """A sidecar's attempts to reach its neighbours."""

    def __init__(self, sidecar: Sidecar, links: Links) -> None:
        self._sidecar, self._links = sidecar, links
        self._probe = neighbour_probe.NeighbourProbe()
        self._busy = False
        self._asked_by = -1  # the connection on which a supervisor last named neighbours
        self._tick()

    def note_order(self) -> None:
        if self._sidecar.order.neighbours:
            self._asked_by = self._connection()

    def unreached(self) -> tuple[tuple[str, ...], float]:
        """Return `unreached` and `unreached_s` of the next report."""
        if self._asked_by != self._connection():
            return (), 0.0
        is_stuck = self._sidecar.member.name in self._links.stuck
        return self._probe.unreached, 0.0 if is_stuck else round(self._probe.unreached_s, 1)

    def _connection(self) -> int:
        member = self._sidecar.member
        return member.world.network.line(member.name).epoch

    def _tick(self) -> None:
        member, order = self._sidecar.member, self._sidecar.order
        if member.gone or member.sidecar not in (None, self._sidecar):
            return
        member.world.after(TICK_MS, self._tick)
        if member.sidecar is None or self._busy:
            return
        urls = order.neighbours if order.do == "run" else ()
        now_s = member.world.now_ns / (1000 * MS)
        late = self._sidecar.is_late
        if self._probe.take_turn(order.generation, urls, now_s, is_late=late, settled=order.settled):
            found = {url: self._is_there(url) for url in urls}
            self._busy = not all(found.values())
            finish = partial(self._finish, found, order, now_s)
            member.world.after(ATTEMPT_MS if self._busy else 0, finish)

    def _is_there(self, url: str) -> bool:
        mine, name = self._sidecar.member, url.removeprefix("http://").removesuffix(":1")
        other = mine.world.members.get(name)
        if other is None or other.gone:
            return False
        return self._links.only_ranks or self._links.reaches(mine.name, name)

    def _finish(self, found: dict[str, bool], order: MemberOrder, now_s: float) -> None:
        async def reaches(url: str) -> bool:
            return found[url]

        self._busy, before = False, self._probe.unreached
        with mock.patch.object(neighbour_probe, "_reaches", reaches):
            asyncio.run(self._probe.probe(tuple(found), now_s, order.must_reach, order.must_confirm))
        if self._probe.unreached != before:
            self._sidecar.member.world.network.tell(self._sidecar.member)

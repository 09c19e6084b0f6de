"""A job of thousands of ranks after a crash of rank 0, and counts of what a decision reads of its reports."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from holdfast.protocol.launcher_messages import Ending
from holdfast.protocol.member_messages import HeldPrivateState, HeldSnapshot
from supervisor.view.model import MemberView, Policy, StorageContents, View
from tests.unit.supervisor import job_views as views

S = 1_000_000_000
NEWEST = 40
STEPS = (37, 38, 39, 40)  # the steps of which members hold private states


class Counted(tuple[HeldPrivateState, ...]):
    """Private states in a report. `read` counts the states of all reports that were read."""

    read = 0

    def __iter__(self) -> Iterator[HeldPrivateState]:
        for each in super().__iter__():
            Counted.read += 1
            yield each


def policy(members: int, nproc: int) -> Policy:
    return Policy(members=members, nproc=nproc, checkpoint_every_s=0.0, members_created_externally=True)


def url(index: int) -> str:
    return f"http://10.0.{index // 250}.{index % 250}:28000"


def name(index: int) -> str:
    return f"gpt-{index}.abcdef01"


def held_by(index: int, members: int, nproc: int) -> Counted:
    """Return the states of the member's own ranks, and of those of the previous member."""
    before = (index - 1) % members
    ranks = [position * nproc + local for position in (index, before) for local in range(nproc)]
    return Counted(HeldPrivateState(each, 1, step, True) for each in dict.fromkeys(ranks) for step in STEPS)


def member(index: int, members: int, nproc: int) -> MemberView:
    ranks = tuple(replace(views.rank(index * nproc + local), local_rank=local) for local in range(nproc))
    if index == 0:
        killed = Ending(99 * S, signal=9, message="killed by SIGKILL")
        ranks = (replace(ranks[0], state="exited", ending=killed), *ranks[1:])
    report = views.report(
        name(index),
        views.launcher(*ranks, parked=tuple(range(nproc)), secure_asked=1),
        nproc=nproc,
        peer_url=url(index),
        privates=held_by(index, members, nproc),
        slots=(HeldSnapshot(1, NEWEST, 10**9), HeldSnapshot(1, 32, 10**9)),
        secured_for=1,
        progress=tuple(views.progress(each.rank, NEWEST) for each in ranks),
    )
    return views.member(name(index), report, heard_ns=1, well_ns=99 * S)


def crashed(members: int, nproc: int, **given: Any) -> View:
    """Return the view of a job in which rank 0 was killed and all other ranks have secured their state."""
    found = views.view(
        *(member(index, members, nproc) for index in range(members)),
        world_size=members * nproc,
        nproc=nproc,
        placement=tuple(map(name, range(members))),
        settled=True,
        since_ns=S,
        held=NEWEST,
        **given,
    )
    return replace(found, stored=StorageContents(looked_ns=1))

"""A recovery of a very large job reads each report a few times, and its orders and its state stay small.

The limits are on counts and sizes and not on times, so that they hold on any machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from holdfast.protocol import codec
from holdfast.protocol.launcher_messages import Ending
from holdfast.protocol.member_messages import HeldPrivateState, HeldSnapshot, MemberOrder, StateSource
from supervisor.admission.pod_layout import MAX_JOB_RANKS
from supervisor.cluster.supervision import held_state
from supervisor.cluster.supervision.held_state import MAX_LISTED, Instant
from supervisor.decision import orders, state_sources, transition
from supervisor.decision.decide import decide
from supervisor.view import faults, reports
from supervisor.view.model import JobState, Policy, RunAction, Secure, Start, View
from tests.unit.supervisor import job_views as views
from tests.unit.supervisor.large_job import NEWEST, STEPS, Counted, crashed, policy, url

HERE = Instant(500, 1_000.0, "a boot")
CRD_CHARACTERS = 262_144  # manifests/base/supervisions.yaml
SIZES = [(1_000, 8), (2_000, 8)]


def recovered(view: View, rules: Policy) -> tuple[Start, View]:
    """Decide until the next generation starts. Return its `Start` and the view after it."""
    action: RunAction = decide(view, rules)
    assert isinstance(action, Secure)
    view = replace(view, memory=transition.after(view, action, rules))
    Counted.read = 0
    action = decide(view, rules)
    assert isinstance(action, Start), action
    return action, replace(view, memory=transition.after(view, action, rules))


@pytest.fixture(scope="module", params=SIZES, ids=lambda size: f"{size[0]} members of {size[1]} ranks")
def start(request: pytest.FixtureRequest) -> tuple[int, int, JobState, int]:
    """Return the size of a job, its state after the decision to restart, and the private states read."""
    members, nproc = request.param
    rules = policy(members, nproc)
    action, view = recovered(crashed(members, nproc), rules)
    assert (action.resume.step, len(action.resume.holders)) == (NEWEST, members)
    return members, nproc, view.memory, Counted.read


def test_each_private_state_is_read_once(start: tuple[int, int, JobState, int]) -> None:
    members, nproc, _, read = start
    assert read == members * nproc * 2 * len(STEPS)


def test_each_member_gets_only_what_it_needs(start: tuple[int, int, JobState, int]) -> None:
    members, nproc, memory, _ = start
    rules = policy(members, nproc)
    made = [orders.order_for(memory, name, rules, None) for name in memory.placement]
    texts = [codec.encode(each) for each in made]
    assert max(map(len, texts[1:])) < 2_500
    assert len(texts[0]) < codec.MAX_MESSAGE_BYTES / 8, "the member of rank 0 writes the checkpoints"
    for order, text in (*zip(made[:2], texts, strict=False), (made[-1], texts[-1])):
        assert codec.decode(MemberOrder, text) == order
    for position, order in enumerate(made):
        for rank in range(position * nproc, (position + 1) * nproc):
            found = {each.url for each in order.sources if each.has(rank) and each.step == NEWEST}
            assert found == {url(position), url((position + 1) % members)}
        assert 1 <= sum(each.rank < 0 for each in order.sources) <= state_sources.SNAPSHOT_HOLDERS


def test_members_that_lack_the_snapshot_fetch_it_from_different_members(
    start: tuple[int, int, JobState, int],
) -> None:
    members, _, memory, _ = start
    asked = [each.url for position in range(members) for each in state_sources.holders(memory, position)]
    assert {asked.count(url(index)) for index in (0, 1, members // 2, members - 1)} == {
        state_sources.SNAPSHOT_HOLDERS
    }


def test_the_writer_of_checkpoints_knows_a_source_of_every_rank(
    start: tuple[int, int, JobState, int],
) -> None:
    members, nproc, memory, _ = start
    order = orders.order_for(memory, memory.placement[0], policy(members, nproc), None)
    assert {each.rank for each in state_sources.of_each_rank(order.sources)} == {-1, *range(members * nproc)}
    assert len(order.sources) < 3 * members


def test_the_state_fits_into_its_supervision_and_is_read_back(
    start: tuple[int, int, JobState, int],
) -> None:
    memory = start[2]
    text = held_state.encode(memory, None, HERE)
    assert len(text) < CRD_CHARACTERS / 4
    found = held_state.decode(text, HERE).memory
    assert by_rank(found) == by_rank(memory)


def by_rank(memory: JobState) -> JobState:
    """Return the state with each list of sources in one order."""

    def ordered(sources: tuple[StateSource, ...]) -> tuple[StateSource, ...]:
        return tuple(sorted(sources, key=lambda each: (each.rank, each.url)))

    assert memory.incident is not None
    assert memory.incident.resume is not None
    resume = replace(memory.incident.resume, sources=ordered(memory.incident.resume.sources))
    incident = replace(memory.incident, resume=resume)
    return replace(memory, sources=ordered(memory.sources), peers=ordered(memory.peers), incident=incident)


def test_the_state_of_the_largest_job_fits_into_its_supervision() -> None:
    members = MAX_JOB_RANKS // 8
    places = tuple(
        f"gpt-large-pretraining-worker-{n}.{n * 2_654_435_761 % 2**32:08x}" for n in range(members)
    )
    urls = [f"http://10.{n * 7919 % 256}.{n * 104_729 % 256}.{n * 31 % 256}:8470" for n in range(members)]
    peers = tuple(StateSource(urls[rank // 8], rank) for rank in range(8 * members))
    held = [StateSource(urls[(n // 8 + k) % members], n, 3, 40) for n in range(8 * members) for k in (0, 1)]
    memory = JobState(8 * members, 8, placement=places, peers=peers, sources=tuple(held))
    assert len(held_state.encode(memory, None, HERE)) < CRD_CHARACTERS


def everywhere(view: View, change: Callable[[Any], Any]) -> View:
    found = []
    for each in view.members:
        assert each.report is not None
        assert each.report.launcher is not None
        ranks = tuple(map(change, each.report.launcher.ranks))
        report = replace(each.report, launcher=replace(each.report.launcher, ranks=ranks))
        found.append(replace(each, report=report))
    return replace(view, members=tuple(found))


def test_the_state_fits_if_every_rank_raises_an_exception() -> None:
    lines = "\n".join(f"  File 'train.py', line {n}" for n in range(60))

    def fail(rank: Any) -> Any:
        message = f"Traceback (most recent call last):\n{lines}\nRuntimeError: NCCL error of rank {rank.rank}"
        ending = Ending((99_000 + rank.rank) * 1_000_000, code=1, fail="exception", message=message)
        return replace(rank, state="exited", ending=ending)

    view = everywhere(crashed(1_000, 8), fail)
    _, after = recovered(view, policy(1_000, 8))
    assert after.memory.incident is not None
    assert len(after.memory.incident.faults) == 8_000
    text = held_state.encode(after.memory, None, HERE)
    assert len(text) < CRD_CHARACTERS
    found = held_state.decode(text, HERE).memory.incident
    assert found is not None
    assert len(found.faults) == MAX_LISTED
    assert faults.root_cause(found.faults) == faults.root_cause(after.memory.incident.faults)


def test_a_member_that_lists_what_it_does_not_hold_cannot_slow_down_the_decision() -> None:
    """Every report lists as much as a message may, but no rank 3 has a state."""
    members, nproc = 2, 2
    many = codec.MAX_ITEMS
    slots = tuple(HeldSnapshot(1, NEWEST - k, 1) for k in range(many))
    false = Counted(HeldPrivateState(k % 3, 1, NEWEST - k // 3, True) for k in range(many))
    view = crashed(members, nproc)
    lying = [
        replace(each, report=replace(each.report, privates=false, slots=slots, unusable=slots[1:]))
        for each in view.members
        if each.report is not None
    ]
    view = replace(view, members=tuple(lying))
    action = decide(view, policy(members, nproc))
    view = replace(view, memory=transition.after(view, action, policy(members, nproc)))
    Counted.read = 0
    action = decide(view, policy(members, nproc))
    assert not isinstance(action, Start)
    assert members * many <= Counted.read <= 3 * members * many


def test_the_steps_of_all_ranks_are_looked_up_without_reading_all_reports_for_each() -> None:
    view = crashed(1_000, 8)
    assert [reports.step_of_rank(view, rank) for rank in range(8_000)] == [NEWEST] * 8_000
    assert reports.step_of_rank(view, 8_000) == -1
    assert reports.step_of_rank(replace(view, memory=views.memory(generation=2)), 0) == -1

"""A job's state is converted to text without loss, and foreign text does no harm."""

from __future__ import annotations

import base64
import json
import zlib
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from holdfast.protocol.launcher_messages import Launch
from holdfast.protocol.member_messages import StateSource
from supervisor.cluster.supervision import held_state
from supervisor.cluster.supervision.held_state import (
    MAX_SOURCES,
    PLAIN_BYTES,
    Instant,
    UnreadableState,
    moved,
)
from supervisor.observability.bookkeeping import Bookkeeping
from supervisor.observability.ledger import Bucket, Ledger
from supervisor.store.packed_json import MAX_BYTES
from supervisor.store.recorded import recorded
from supervisor.view.model import JobState, OpenIncident, ResumePoint
from tests.simulation.cluster.scripts import cued
from tests.unit.supervisor.job_views import S, fault, memory

HERE = Instant(500 * S, 1_000.0, "a boot")
TIMES = st.integers(min_value=1, max_value=1 << 62)


def states() -> list[JobState]:
    """Return the states after each decision in simulated histories, and some with other kinds of values."""
    worlds = [cued(1, 3, what) for what in ("lose", "nan", "hang")]
    for world in worlds:
        world.run()
    found = [after for world in worlds for _, _, after in world.journal]
    assert len(found) > 15
    incident = OpenIncident(3, 2, 90 * S, 91 * S, 7.5, (fault("nan"), fault("hang")), cause=fault("crash"))
    return [*found, JobState(1, 1), memory(incident=incident, since_ns=5, message="\u00e9\ud800")]


STATES = states()
MEMORIES = st.builds(
    lambda made, since_ns, started_ns, message, lost: replace(
        made, since_ns=since_ns, started_ns=started_ns, message=message, lost=lost
    ),
    st.sampled_from(STATES),
    st.just(0) | TIMES,
    st.just(0) | TIMES,
    st.text(max_size=40),
    st.lists(st.text(max_size=10), max_size=4).map(tuple),
)


def times(value: object) -> list[int]:
    """Return every time in a dataclass, in one order."""
    found: list[int] = []
    if is_dataclass(value):
        for each in fields(value):
            part = getattr(value, each.name)
            if each.name.endswith("_ns"):
                found.append(part)
            found += times(part)
    elif isinstance(value, tuple):
        for part in value:
            found += times(part)
    return found


def ledger(at_ns: int = 400 * S) -> Ledger:
    made = Ledger(100 * S, Bucket.START)
    made.enter(Bucket.PRODUCTIVE, 200 * S)
    made.trained(5, 300 * S)
    made.advance(at_ns)
    return made


@given(MEMORIES, st.integers(0, 1 << 61), st.floats(0, 1e10))
def test_a_state_read_back_on_the_same_host_is_unchanged(
    state: JobState, later_ns: int, wall_s: float
) -> None:
    text = held_state.encode(state, ledger().snapshot(), HERE)
    found = held_state.decode(text, Instant(HERE.monotonic_ns + later_ns, wall_s, HERE.clock))
    assert found.memory == state
    assert found.ledger == ledger().snapshot()
    assert held_state.encode(state, ledger().snapshot(), HERE) == text


@given(MEMORIES, st.integers(-(1 << 61), 1 << 61))
def test_times_converted_to_the_wall_clock_and_back_are_unchanged(state: JobState, by_ns: int) -> None:
    assume(-by_ns not in times(state))
    there = moved(state, by_ns)
    assert moved(there, -by_ns) == state
    assert [at_ns + by_ns if at_ns else 0 for at_ns in times(state)] == times(there)


@given(TIMES)
def test_no_time_is_converted_to_the_number_that_means_never(at_ns: int) -> None:
    assert moved(JobState(1, 1, since_ns=at_ns), -at_ns).since_ns == 1
    assert moved(JobState(1, 1), at_ns).since_ns == 0


def test_only_whole_numbers_with_a_time_suffix_are_converted() -> None:
    state = memory(incident=OpenIncident(3, 2, 90 * S, 91 * S, 7.5), incidents=9, since_ns=80 * S)
    there = moved(state, S)
    assert there.incident is not None
    assert (there.incident.fault_ns, there.incident.looked_ns) == (91 * S, 0)
    assert (there.incident.wall_s, there.incidents, there.generation) == (7.5, 9, state.generation)


def test_another_host_reads_the_times_on_its_own_clock() -> None:
    """20 s have passed, and the other host's clock is at 50 s."""
    text = held_state.encode(JobState(1, 1, since_ns=490 * S), ledger().snapshot(), HERE)
    found = held_state.decode(text, Instant(50 * S, 1_020.0, "another boot"))
    assert found.memory.since_ns == 20 * S, "10 s before the write, which was 20 s ago"
    restored = Ledger.restore(found.ledger)
    assert restored.at_ns == -70 * S, "100 s before the write"
    assert restored.total_ns == ledger().total_ns


@pytest.mark.parametrize(
    ("written", "read"),
    [([2, 2, 0], (2, 2, 0)), ([], ()), ([3, 0, 0], ()), ([0, 1], ()), ("x", ()), (None, ())],
)
def test_the_next_supervisor_learns_which_member_keeps_whose_private_states(
    written: object, read: tuple[int, ...]
) -> None:
    launch = Launch(1, 3, 1, "127.0.0.1", 4000, -1, 0.01, backups=(1, 2, 0))
    state = JobState(3, 1, generation=1, placement=("m0", "m1", "m2"), launch=launch)
    content = json.loads(held_state.encode(state, None, HERE))
    assert content["backups"] == [1, 2, 0]
    found = held_state.decode(json.dumps({**content, "backups": written}), HERE).memory.launch
    assert found == replace(launch, backups=read)


def test_a_wall_clock_that_was_set_back_means_that_no_time_has_passed() -> None:
    text = held_state.encode(JobState(1, 1, since_ns=490 * S), None, HERE)
    found = held_state.decode(text, Instant(30 * S, 10.0, "another boot"))
    assert found.memory.since_ns == 20 * S


def test_hosts_whose_clocks_have_no_identity_count_as_two() -> None:
    unknown = replace(HERE, clock="")
    text = held_state.encode(JobState(1, 1, since_ns=490 * S), None, unknown)
    assert held_state.decode(text, Instant(30 * S, 1_000.0, "")).memory.since_ns == 20 * S


def test_the_ledger_continues_on_another_host_without_a_gap() -> None:
    text = held_state.encode(JobState(1, 1), ledger().snapshot(), HERE)
    found = held_state.decode(text, Instant(900 * S, 1_007.0, "another boot"))
    accounts = Bookkeeping(900 * S, found.ledger)
    accounts.ledger.advance(900 * S)
    assert accounts.ledger.total_ns == ledger().total_ns + 107 * S


@pytest.mark.parametrize("wrong", [None, [], "text", {}, {"hour": 1}, {"opened_ns": "x"}, {"opened_ns": 1.5}])
def test_an_invalid_ledger_loses_only_the_ledger(wrong: object) -> None:
    text = held_state.encode(JobState(1, 1, generation=4), wrong, HERE)
    found = held_state.decode(text, Instant(3, 0.0))
    assert found.memory.generation == 4
    if found.ledger:
        with pytest.raises(ValueError, match="ledger"):
            Bookkeeping(0, found.ledger)


def test_a_ledger_with_an_infinite_time_is_refused() -> None:
    never = float("inf")
    for change in ({"hour": [[never, 1]]}, {"day": [[1, never]]}, {"pending": [[1, 1, never]]}):
        wrong = {**ledger().snapshot(), **change}
        found = held_state.decode(held_state.encode(JobState(1, 1), wrong, HERE), HERE)
        with pytest.raises(ValueError, match="ledger"):
            Bookkeeping(0, found.ledger)


def resumed() -> JobState:
    """Return a state whose incident resumed from other sources than a later request to save uses."""
    sources = (StateSource("a", -1, 3, 7), StateSource("a", 0, 3, 7), StateSource("b", 1, 3, 7))
    point = ResumePoint(7, 3, "slot", "", (*sources, StateSource("c", 1, 3, 7)), ("m1", "gone", "m0"))
    incident = OpenIncident(3, 2, 90 * S, 91 * S, 7.5, resume=point)
    peers = (StateSource("a", 0), StateSource("a", 1))
    return memory(incident=incident, sources=sources, peers=peers)


def test_the_sources_of_an_incident_can_differ_from_those_of_a_later_checkpoint() -> None:
    assert held_state.decode(held_state.encode(resumed(), None, HERE), HERE).memory == resumed()


def test_a_state_of_an_earlier_version_lists_its_sources_in_full() -> None:
    content = json.loads(held_state.encode(resumed(), None, HERE))
    content = {name: content[name] for name in ("at_ns", "wall_s", "clock", "ledger")}
    text = json.dumps({**content, "format": 1, "memory": recorded(resumed())})
    assert held_state.decode(text, HERE).memory == resumed()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sources", None),
        ("sources", [["a", 0, 1, 1]]),
        ("peers", [["a", 0, 1, 1, True]]),
        ("peers", [[0, 0, 1, 1, 1]]),
        ("resumed", [["a", 0, 1, 1, 0]]),
        ("sources", [["a", 0, 1, 1, MAX_SOURCES + 1]]),
        ("sources", [["a", 0, 1, 1, MAX_SOURCES], ["a", 0, 1, 1, 1]]),
        ("holders", [7]),
        ("holders", [None]),
        ("holders", 3),
    ],
)
def test_sources_and_holders_that_no_supervisor_has_written_are_refused(name: str, value: object) -> None:
    content = json.loads(held_state.encode(resumed(), None, HERE))
    with pytest.raises(UnreadableState):
        held_state.decode(json.dumps({**content, name: value}), HERE)


# -- what is no state


@given(st.text() | st.text().map(lambda text: "zlib:" + text))
def test_any_text_is_a_state_or_unreadable(text: str) -> None:
    with pytest.raises(UnreadableState):
        held_state.decode(text, HERE)


@given(st.binary())
def test_any_packed_bytes_are_unreadable(data: bytes) -> None:
    for packed in (data, zlib.compress(data)):
        with pytest.raises(UnreadableState):
            held_state.decode("zlib:" + base64.b64encode(packed).decode(), HERE)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=30)
@given(
    st.sampled_from(["at_ns", "wall_s", "clock", "memory", "ledger", "format"]),
    _JSON | st.sampled_from([float("inf"), -float("inf"), float("nan"), 10**400, -(10**400)]),
)
def test_any_value_in_place_of_another_is_read_or_refused(name: str, value: object) -> None:
    content = json.loads(held_state.encode(memory(), ledger().snapshot(), HERE))
    for now in (HERE, Instant(7, 2_000.0, "another boot")):
        with suppress(UnreadableState):
            held_state.decode(json.dumps({**content, name: value}), now)


@settings(max_examples=30)
@given(st.sampled_from(STATES), st.data())
def test_any_value_within_the_state_is_read_or_refused(state: JobState, data: st.DataObject) -> None:
    content: dict[str, Any] = {"format": 1, "at_ns": 5, "wall_s": 1.0, "clock": "", "ledger": None}
    content["memory"] = recorded(state)
    name = data.draw(st.sampled_from(sorted(content["memory"])))
    content["memory"][name] = data.draw(_JSON)
    with suppress(UnreadableState):
        held_state.decode(json.dumps(content), Instant(7, 2_000.0, "another boot"))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"at_ns": None}, "its time is missing"),
        ({"at_ns": 1.5}, "its time is missing"),
        ({"at_ns": True}, "its time is missing"),
        ({"clock": 3}, "its time is missing"),
        ({"wall_s": float("inf")}, "its time is out of range"),
        ({"wall_s": float("nan")}, "its time is out of range"),
        ({"wall_s": 10**400}, "an integer of 401 digits"),
        ({"at_ns": 1 << 63}, "its time is out of range"),
        ({"format": 3}, "its format is not known"),
        ({"memory": 3}, "is not an object"),
    ],
)
def test_a_state_without_a_time_is_unreadable(change: dict[str, Any], why: str) -> None:
    content = json.loads(held_state.encode(memory(), None, HERE))
    with pytest.raises(UnreadableState, match=why):
        held_state.decode(json.dumps({**content, **change}), HERE)
    for name in ("at_ns", "wall_s", "clock"):
        with pytest.raises(UnreadableState, match=f"'{name}' is missing"):
            held_state.decode(json.dumps({key: content[key] for key in content if key != name}), HERE)


def test_a_field_of_a_later_version_is_ignored() -> None:
    content = json.loads(held_state.encode(memory(), None, HERE))
    content["memory"]["colour"] = content["more"] = "red"
    assert held_state.decode(json.dumps(content), HERE).memory == memory()


# -- sizes


def test_a_large_state_is_compressed_to_fit_into_the_resource() -> None:
    """The CRD allows 256 KiB. 2,000 members with long names are twice the design limit of a supervisor."""
    names = tuple(f"a-training-job-with-a-long-name-worker-{n}.{n:08x}" for n in range(2_000))
    state = memory(placement=names, lost=names[::7], world_size=16_000, nproc=8)
    text = held_state.encode(state, ledger().snapshot(), HERE)
    assert text.startswith("zlib:")
    assert len(text) < 262_144
    assert held_state.decode(text, HERE).memory == state
    assert not held_state.encode(memory(), None, HERE).startswith("zlib:")


def test_text_that_unpacks_to_too_much_or_is_truncated_is_unreadable() -> None:
    bomb = base64.b64encode(zlib.compress(b" " * (MAX_BYTES + 1))).decode()
    whole = held_state.encode(memory(message="x" * PLAIN_BYTES), None, HERE)
    packed = base64.b64decode(whole.removeprefix("zlib:"))
    for text in ("zlib:" + bomb, "zlib:" + base64.b64encode(packed[:-9]).decode(), whole[:-5]):
        with pytest.raises(UnreadableState):
            held_state.decode(text, HERE)


def test_the_members_that_were_ordered_to_end_are_known_to_the_next_leader() -> None:
    state = JobState(2, 1, phase="stopping", bystanders=("w-0.1", "w-1.2"))
    text = held_state.encode(state, None, HERE)
    assert held_state.decode(text, HERE).memory.bystanders == ("w-0.1", "w-1.2")
    older = json.loads(text)
    del older["bystanders"]
    assert held_state.decode(json.dumps(older), HERE).memory.bystanders == ()

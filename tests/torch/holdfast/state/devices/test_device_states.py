"""Whatever a device has run when a peer dies, a state that counts as whole is exactly its step's state."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from holdfast.fileio.safetensors import map_file
from holdfast.protocol.launcher_messages import Launch, RankStart, SecureAnswer
from holdfast.protocol.progress_writer import Page
from holdfast.snapshot.private_store import PrivateStore
from holdfast.state.capture import JSON_ENTRY
from holdfast.state.private_state import parse_sections
from holdfast.training.protection import last_copies
from holdfast.training.protection.write_gate import WriteGate
from holdfast.training.session import Session
from holdfast.training.state import State
from holdfast.worker.launcher_channel import LauncherChannel
from tests.sandbox import memory_directory
from tests.torch.holdfast.simulated_device import Here, Late, Simulated, Stuck
from tests.torch.holdfast.training.test_state import Position, Unheard

GENERATION = 3
LAUNCH = Launch(GENERATION, 1, 1, "", 0, 0, 0.0)
STEPS = 6

GATE_S = 0.02  # the time after which a host counts as stuck in its writes

Bits = dict[str, bytes]

intervals = st.integers(0, 3)
choices = st.lists(st.integers(0, 31), min_size=1, max_size=40)


@pytest.fixture(autouse=True, scope="module")
def impatient() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(last_copies, "GATE_S", GATE_S)
        yield


class Training:
    """A script with its kernels on the device, and its learning rate, counters and data on the host."""

    def __init__(
        self, memory: Path, device: Simulated, every: int = 0, hangs_at: int = STEPS, gives_loss: bool = True
    ) -> None:
        launch = replace(LAUNCH, snapshot_every=every)
        session = Session(launch, RankStart(0, 0), LauncherChannel(Unheard(), memory, 0, 1))
        session._rank.page = Page.create(memory / "page-0.bin")
        session._rank.page.begin(GENERATION, 0, 0, 1, 0)
        session._rank.accelerator = device
        torch.manual_seed(1)
        self.device, self.hangs_at, self.gives_loss = device, hangs_at, gives_loss
        self.model = nn.Linear(4, 3)
        self.model.weight.data = self.model.weight.data.t().contiguous().t()  # like channels_last
        for parameter in self.model.parameters():
            device.put(parameter)
            parameter.grad = device.put(torch.zeros_like(parameter))
        self.optimizer = Late(self.model.parameters(), device)
        self.data = Position()
        self.loss_of: Callable[[int], float] = lambda step: 3.0 - step / 10
        self.memory = memory
        self.state: State = session.protect(model=self.model, optimizer=self.optimizer, data=self.data)

    def host(self) -> Iterator[None]:
        """Do the steps; yield after each call, so that a test can stop there."""
        for step in self.state.steps(STEPS):
            self.state._training.forward()
            yield
            loss = self.device.put(torch.full((), -1.0))
            self.device.launch(lambda loss=loss, step=step: loss.fill_(self.loss_of(step)))  # type: ignore[misc]
            self.data.at += 6
            self.state._training.backward()
            yield
            if step == self.hangs_at:
                self.device.hang()
            for number, parameter in enumerate(self.model.parameters()):
                grad = parameter.grad
                assert grad is not None
                self.device.launch(lambda g=grad, v=step + number + 1: g.fill_(v / 7))  # type: ignore[misc]
            yield
            if self.state._gate.frozen:
                raise Stuck  # in `before_write`, forever
            self.optimizer.step()
            yield
            for group in self.optimizer.param_groups:
                group["lr"] = 0.5 / (step + 2)
            yield
            self.state.commit(loss=loss if self.gives_loss else None)
            yield
            # The end of the loop waits for the copy in progress; with one thread it would wait forever.
            kept = self.state._protection
            if step == STEPS - 1 and kept is not None and kept.snapshots.copying.locked():
                raise Stuck

    def held(self) -> dict[int, Bits]:
        """Return the contents of the arena by step."""
        kept = self.state._protection
        assert kept is not None
        found: dict[int, Bits] = {}
        for record in kept.snapshots.arena.records():
            layout, mapping = map_file(record.path)
            with mapping:
                at = layout.data_offset
                bits = {each.name: mapping[at + each.begin : at + each.end] for each in layout.entries}
            found[record.step] = {**bits, JSON_ENTRY: bits[JSON_ENTRY].rstrip()}
        return found

    def private(self, step: int) -> int:
        """Return the stored position of the data for `step`."""
        blob = PrivateStore(self.memory / "arena" / "private-00000.bin", 0).get(step, GENERATION)
        assert blob is not None
        assert blob.final
        return int(json.loads(parse_sections(blob.data)["objects"])["data"]["at"])


def reference() -> dict[int, Bits]:
    """Return the state of every step of a run where each kernel finishes before the next call."""
    states: dict[int, Bits] = {}
    with memory_directory() as memory:
        device = Simulated()
        device.meanwhile = lambda _: device.drain()
        training = Training(memory, device, every=1)
        for _ in training.host():
            states.update(training.held())
        states.update(training.held())
    assert sorted(states) == list(range(STEPS + 1))
    assert len({state["model.weight"] for state in states.values()}) == STEPS + 1
    return states


REFERENCE: dict[int, Bits] = {}


def expected() -> dict[int, Bits]:
    if not REFERENCE:
        REFERENCE.update(reference())
    return REFERENCE


def exact(training: Training) -> None:
    """Check that each snapshot equals its step's state, bit for bit, and has its private state."""
    for step, bits in training.held().items():
        assert bits == expected()[step], f"step {step}"
        assert training.private(step) == 6 * step


def run_until(training: Training, calls: int) -> Iterator[None]:
    """Let the host make `calls` calls; return an iterator over the rest."""
    host = training.host()
    with suppress(Stuck):
        for _ in range(calls):
            next(host, None)
    return host


def secured(training: Training) -> SecureAnswer:
    kept = training.state._protection
    assert kept is not None
    return kept.snapshot_just_in_time(GENERATION)


@settings(max_examples=100)
@given(
    choices, st.integers(1, 6 * STEPS), st.integers(0, 3), st.integers(0, STEPS), st.booleans(), st.booleans()
)
def test_a_state_that_counts_as_whole_is_exactly_that_of_its_step(
    order: list[int], calls: int, every: int, hangs_at: int, goes_on: bool, gives_loss: bool
) -> None:
    with memory_directory() as memory:
        device = Simulated(order)
        training = Training(memory, device, every, hangs_at, gives_loss)
        host = run_until(training, calls)
        exact(training)
        if goes_on:  # the host has not noticed the dead peer yet, and runs while its state is copied
            device.meanwhile = Beside(training, host)
        answer = secured(training)
        device.meanwhile = lambda _: None
        exact(training)
        if answer.whole:
            assert answer.step in training.held()
        device.drain()
        exact(training)


class Beside:
    """Runs the host by one call at a time while another thread waits for the device."""

    def __init__(self, training: Training, host: Iterator[None]) -> None:
        self._training, self._host = training, host
        self._inside = False

    def __call__(self, choice: int) -> None:
        kept = self._training.state._protection
        assert kept is not None
        # While a lock is held the host would wait here; with one thread it would wait forever.
        if self._inside or not choice & 16 or self._training.state._gate._queue_lock.locked():
            return
        self._inside = True
        with suppress(Stuck):
            next(self._host, None)
        self._inside = False


@settings(max_examples=60)
@given(choices, st.integers(0, STEPS - 1), intervals, st.booleans())
def test_a_device_that_waits_for_a_dead_peer_holds_the_last_committed_state_wherever_its_host_is(
    order: list[int], hangs_at: int, every: int, gives_loss: bool
) -> None:
    with memory_directory() as memory:
        device = Simulated([*order, 7])
        training = Training(memory, device, every, hangs_at, gives_loss)
        run_until(training, 6 * STEPS)
        assert training.state.step >= hangs_at
        answer = secured(training)
        assert (answer.step, answer.whole) == (hangs_at, True), answer
        assert hangs_at in training.held()
        exact(training)


@given(choices, intervals)
def test_copies_do_not_change_a_run_without_a_fault(order: list[int], every: int) -> None:
    with memory_directory() as memory:
        device = Simulated([*order, 5])
        training = Training(memory, device, every)
        run_until(training, 10 * STEPS)
        device.drain()
        assert training.state.step == STEPS
        exact(training)
        if every == 1:
            assert sorted(training.held()) == [STEPS - 1, STEPS]


@given(choices, intervals)
def test_a_script_that_ends_leaves_a_copy_of_its_last_state(order: list[int], every: int) -> None:
    with memory_directory() as memory:
        training = Training(memory, Simulated([*order, 5]), every)
        run_until(training, 10 * STEPS)
        kept = training.state._protection
        assert kept is not None
        assert (not kept.keep_final_state()) == (every > 0)
        assert (STEPS in training.held()) == (every > 0)
        exact(training)


def test_a_state_is_whole_only_before_or_after_the_writes_of_all_optimizers_in_their_own_streams() -> None:
    """Each has marks in its own stream, which the device reaches in any order."""
    device = Simulated((0,), rests=True)
    gate = WriteGate(device)
    gate.start(4)
    marks = [Here() for _ in range(5)]
    device.mark = iter(marks).__next__  # type: ignore[method-assign]
    gate.begin_writes(4, lambda: "host's part")
    gate.begin_more_writes()
    old = gate.whole_state()
    assert old is not None
    assert (old.step, old.part) == (4, "host's part")
    marks[1].reached = True  # the second one has begun, the first has not
    assert gate.whole_state() is None
    assert not gate.is_still_whole(old)
    gate.end_some_writes()
    gate.end_some_writes()
    gate.end_writes()
    for mark in (marks[0], marks[4], marks[2]):  # the commit's mark before the second optimizer's end
        mark.reached = True
        assert gate.whole_state() is None
    marks[3].reached = True
    queued = list(gate._queued)
    new = gate.whole_state()
    assert new is not None
    assert (new.step, new.part) == (5, None)
    assert list(gate._queued) == queued, "only the thread that writes changes the queue"
    gate.keep_pace()
    assert not gate._queued
    assert gate.whole_state() == new

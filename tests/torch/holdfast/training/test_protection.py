"""Snapshots and private states of a rank: their times, their contents, and which of them are void."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.optim.swa_utils import AveragedModel

from holdfast.errors import BadInput
from holdfast.protocol import progress
from holdfast.protocol.launcher_messages import Launch, SecureAnswer
from holdfast.protocol.progress_writer import Page
from holdfast.protocol.rank_channel import WorkerOrder
from holdfast.snapshot import page_tables
from holdfast.snapshot.arena import SnapshotGone
from holdfast.snapshot.private_store import PrivateReader
from holdfast.state import restore as restoring
from holdfast.state import torch_hooks
from holdfast.state.private_state import PrivateState, parse_sections
from holdfast.training.protection import late_changes
from holdfast.training.protection.snapshot_replacement import FIRST_AFTER_STEPS
from holdfast.training.protection.snapshot_writer import SnapshotWriter
from holdfast.training.session import Session
from tests.sandbox import in_child, limit_file_size, memory_directory
from tests.torch.holdfast.state.test_private_state import Drawn
from tests.torch.holdfast.training.test_state import Script, alone, resumed, supervised

SELDOM = Launch(3, 1, 1, "", 0, 4096, 0.0)  # the interval for snapshots is never reached


def steps_of(script: Script) -> set[int]:
    assert script.state._protection is not None
    return {record.step for record in script.state._protection.snapshots.arena.records()}


def page_of(memory: Path) -> progress.Progress:
    found = progress.read((memory / "page-0.bin").read_bytes())
    assert found is not None
    return found


def test_a_generation_takes_a_snapshot_soon_after_its_start(memory: Path) -> None:
    assert steps_of(Script(supervised(memory, SELDOM)).run(FIRST_AFTER_STEPS + 40)) == {0, FIRST_AFTER_STEPS}


def test_a_new_process_populates_the_pages_of_the_slots_before_it_copies(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Script(supervised(memory, SELDOM)).run(FIRST_AFTER_STEPS)
    [of_state] = [
        r.total_bytes
        for r in SnapshotWriter(memory / "arena", {}, 1).arena.records()
        if r.step == FIRST_AFTER_STEPS
    ]
    met: list[tuple[object, int]] = []
    monkeypatch.setattr(
        page_tables, "populate_ahead", lambda arena, total_bytes: met.append((arena, total_bytes))
    )
    script = Script(resumed(memory, first, SELDOM, FIRST_AFTER_STEPS)).run(FIRST_AFTER_STEPS + 3)
    assert script.state._protection is not None
    assert met == [(script.state._protection.snapshots.arena, of_state)]


def test_an_interval_of_0_takes_only_the_first_snapshot(memory: Path) -> None:
    assert steps_of(
        Script(supervised(memory, replace(SELDOM, snapshot_every=0))).run(FIRST_AFTER_STEPS + 40)
    ) == {0}


def test_a_slot_that_an_old_rank_has_overwritten_after_the_sidecars_check_is_not_restored(
    memory: Path,
) -> None:
    """It would be the state of a different step from the one at which the other members resume."""
    launch = replace(SELDOM, snapshot_every=4)
    script = Script(supervised(memory, launch)).run(8)
    session = resumed(memory, script, launch, 4)
    script.run(12)  # the old rank has not been killed yet
    with pytest.raises(SnapshotGone, match="the snapshot of step 4 was overwritten before it was restored"):
        Script(session)


def test_a_resumable_step_keeps_its_private_states_however_many_steps_follow(memory: Path) -> None:
    every = replace(SELDOM, snapshot_every=1)
    first = Script(supervised(memory, every)).run(37)  # a step that would normally be dropped soon
    script = Script(resumed(memory, first, SELDOM, 37)).run(37 + 300)
    kept = PrivateReader(memory / "arena" / "private-00000.bin")
    for step in steps_of(script):
        found = kept.get(step)
        assert found is not None, f"the snapshot of step {step} could not be resumed from"
        assert found.final
    assert steps_of(script) == {37, 37 + FIRST_AFTER_STEPS}


@pytest.mark.parametrize("mask_bytes", [0, 2 << 20], ids=["small", "large"])
def test_a_snapshot_of_any_step_has_its_private_states_as_long_as_it_exists(
    memory: Path, mask_bytes: int
) -> None:
    """Weights are swapped in pauses, and the copies before them are of arbitrary steps."""
    script = Script(supervised(memory, SELDOM), mask_bytes)
    kept = PrivateReader(memory / "arena" / "private-00000.bin")
    snapshots: set[int] = set()
    for step in script.state.steps(260):
        script.state.commit(loss=script.step())
        if step + 1 in (13, 29, 30, 101):
            with script.state.pause(f"evaluation {step}"):
                weights = {name: tensor.clone() for name, tensor in script.model.state_dict().items()}
                script.model.load_state_dict({name: tensor * 0 for name, tensor in weights.items()})
                script.model.load_state_dict(weights)
        there = steps_of(script)
        snapshots |= there
        for each in there:
            found = kept.get(each)
            assert found is not None, f"after step {step} that of {each} could not be resumed from"
            assert found.final
    assert snapshots == {0, FIRST_AFTER_STEPS, 13, 29, 30, 101}


def test_the_page_shows_the_size_of_the_state_from_the_first_step_on(memory: Path) -> None:
    script = Script(supervised(memory, SELDOM)).run(2)
    with_moments = sum(p.nbytes for p in script.model.parameters()) * 3
    assert page_of(memory).state_bytes > with_moments


def test_the_next_generation_knows_the_time_of_a_copy_before_it_has_made_one(memory: Path) -> None:
    every = replace(SELDOM, snapshot_every=1)
    first = Script(supervised(memory, every)).run(5)
    SnapshotWriter(memory / "arena", {}, 1).arena.note_cost(page_of(memory).state_bytes, 7.5)
    Script(resumed(memory, first, every, 5))
    found = page_of(memory)
    assert found.snapshot_step == -1
    assert found.state_bytes > 0
    assert 7.0 < progress.copy_s(found) <= 8.0


def test_the_interval_is_chosen_by_the_time_of_copies_once_the_slots_are_filled(memory: Path) -> None:
    """The first copies of a large frozen part take a second, which must not delay the next one by an hour."""
    keeping = Script(supervised(memory, SELDOM)).run(1).state._protection
    assert keeping is not None
    snapshots = keeping.snapshots
    snapshots._cost = replace(snapshots._cost, seconds=0.0)
    for read, coming, cost_s, expected_s in [
        (1.0, 1.0, 1.0, 1.0),  # into the first slot
        (1.0, 0.01, 1.1, 0.011),  # into the second: the kernel reports writes
        (1.0, 0.01, 0.6, 0.006),  # the first again, compared
        (0.01, 0.01, 0.02, 0.02),  # only the rest
        (0.01, 0.01, 0.03, 0.02),
        (1.0, 1.0, 0.7, 0.7),  # the kernel no longer reports writes
    ]:
        snapshots.writer.was_read, snapshots.writer.frozen.coming = read, coming
        keeping.snapshots._note(5, cost_s)
        assert keeping.snapshots._cost.seconds == pytest.approx(expected_s)


def test_a_private_state_that_does_not_fit_does_not_stop_the_training(
    memory: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def child() -> None:
        script = Script(supervised(memory, SELDOM)).run(3)
        script.data.state_dict = lambda: {"at": script.data.at, "more": "x" * 200_000}  # type: ignore[method-assign]
        limit_file_size(1_000_000)
        script.run(6)
        assert script.state.step == 6

    assert in_child(child) == 0
    said = capfd.readouterr().err
    assert said.count("cannot be stored in memory") == 1
    assert "training continues" in said
    found = {held.step: held for held in PrivateReader(memory / "arena" / "private-00000.bin").held()}
    assert found[2].final
    assert not found[6].final, "it was skipped, and no rank resumes from it"


def test_a_state_that_is_still_being_restored_does_not_count_as_whole(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = replace(SELDOM, snapshot_every=1)
    session = resumed(memory, Script(supervised(memory, every)).run(2), every, 2)
    answers: list[SecureAnswer] = []
    restore = restoring.restore

    def asked(*given: Any) -> list[str]:
        assert session._protection is not None
        answers.append(session._protection.snapshot_just_in_time(session.generation))
        return restore(*given)

    monkeypatch.setattr(restoring, "restore", asked)
    script = Script(session)
    assert [(each.whole, each.why) for each in answers] == [(False, "its state is still being restored")]
    assert script.state._gate.frozen, "otherwise it overwrites the state that the others resume from"
    assert script.state._protection is not None
    assert script.state._protection.snapshot_just_in_time(session.generation).whole


def test_a_rank_with_a_bad_state_is_frozen_and_copies_nothing_even_at_its_exit(
    memory: Path,
) -> None:
    """Its copy would replace one of the snapshots that were reported while it was still training."""
    script = Script(supervised(memory, SELDOM)).run(5)
    kept = script.state._protection
    assert kept is not None
    listed = kept.snapshots.arena.records()
    answer = kept.snapshot_just_in_time(SELDOM.generation, copy=False)
    assert (answer.whole, answer.why) == (False, "the state was found to be bad, so it is not copied")
    assert script.state._gate.frozen
    kept.last_copies.before_exit()
    assert kept.snapshots.arena.records() == listed


@pytest.mark.parametrize("generation", [1, 2])
def test_a_rank_that_is_secured_before_it_has_a_state_makes_no_step(memory: Path, generation: int) -> None:
    """At a stop at the start of a generation, a step would overwrite the state of the last checkpoint."""
    session = supervised(memory, replace(SELDOM, generation=2))
    session._obey(WorkerOrder("secure", generation=generation))
    assert Script(session).state._gate.frozen == (generation == 2)


class Ramped(Script):
    """A script with a scheduler of a custom class, stepped after each commit, as many scripts do."""

    def __init__(self, session: Session) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.ramp = Ramp(self.optimizer)
        self.state = session.protect(model=self.model, optimizer=self.optimizer, ramp=self.ramp)

    def run(self, until: int) -> Ramped:
        for _ in self.state.steps(until):
            self.optimizer.zero_grad()
            loss = self.model(torch.randn(6, 4)).pow(2).mean()
            loss.backward()
            self.optimizer.step()
            self.state.commit(loss=loss)
            self.ramp.step()
        return self

    def bits(self) -> list[Any]:
        return [self.written(), self.ramp.count, self.optimizer.param_groups[0]["lr"]]


class Ramp:
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.count = optimizer, 0

    def step(self) -> None:
        self.count += 1
        for group in self.optimizer.param_groups:
            group["lr"] = 0.01 * min(1.0, (self.count + 1) / 30)

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


@pytest.mark.parametrize("just_in_time", [False, True])
def test_a_custom_scheduler_that_steps_after_each_commit_loses_no_step(
    memory: Path, capfd: pytest.CaptureFixture[str], just_in_time: bool
) -> None:
    launch = replace(SELDOM, snapshot_every=4)
    script = Ramped(supervised(memory, launch)).run(11)
    step = 11 if just_in_time else 8
    if just_in_time:
        assert script.state._protection is not None
        assert script.state._protection.snapshot_just_in_time(launch.generation).whole
    assert "private to a rank" not in capfd.readouterr().err
    again = Ramped(resumed(memory, script, launch, step))
    assert again.ramp.count == step
    assert again.run(40).bits() == Ramped(alone()).run(40).bits()


def test_a_custom_scheduler_is_restored_from_the_private_state_of_an_earlier_version(memory: Path) -> None:
    launch = replace(SELDOM, snapshot_every=4)

    def before(session: Session) -> Ramped:
        """Create the script with the classification of earlier versions."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch_hooks, "is_custom_scheduler", lambda *_: False)
            return Ramped(session)

    session = resumed(memory, before(supervised(memory, launch)).run(9), launch, 8)
    assert Ramped(session).ramp.count == 7, "a step after the commit was not saved"


class Drawing(Script):
    """A script whose sampler has its own generator."""

    def __init__(self, session: Session) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.sampler = Drawn(session.generation)
        self.state = session.protect(model=self.model, optimizer=self.optimizer, sampler=self.sampler)

    def run(self, until: int) -> Drawing:
        for _ in self.state.steps(until):
            self.optimizer.zero_grad()
            loss = self.model(torch.tensor(self.sampler.draw()) / 1000).pow(2).mean()
            loss.backward()
            self.optimizer.step()
            self.state.commit(loss=loss)
        return self


@pytest.mark.parametrize("earlier", [False, True])
def test_a_samplers_generator_is_saved_per_rank_and_restored_from_states_of_earlier_versions(
    memory: Path, earlier: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    launch = replace(SELDOM, snapshot_every=4)
    with pytest.MonkeyPatch.context() as patch:
        if earlier:  # as earlier versions classified it
            patch.setattr(torch_hooks, "is_generator_state", lambda _: False)
        before = Drawing(supervised(memory, launch)).run(8)
    assert ("sampler" in before.state._private.own) is not earlier
    again = Drawing(resumed(memory, before, launch, 8))
    assert "sampler" in again.state._private.own
    assert again.sampler.draw() == before.sampler.draw()
    assert ("sampler was saved only once for all ranks" in capsys.readouterr().err) is earlier


class Averaged(Script):
    """A script that keeps an average of its weights as in the guide, updated before the commit."""

    def __init__(self, session: Session) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.ema = AveragedModel(self.model)
        self.state = session.protect(model=self.model, optimizer=self.optimizer, ema=self.ema)

    def step(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss: torch.Tensor = self.model(torch.randn(6, 4)).pow(2).mean()
        loss.backward()
        self.optimizer.step()
        self.ema.update_parameters(self.model)
        return loss

    def bits(self) -> list[Any]:
        values = [*self.model.parameters(), *self.ema.parameters(), self.ema.n_averaged]
        return [[each.tolist() for each in values], self.state._private.core()]


def test_an_average_does_not_delay_the_private_state(memory: Path, capfd: pytest.CaptureFixture[str]) -> None:
    first = Averaged(supervised(memory, SELDOM))
    kept = PrivateReader(memory / "arena" / "private-00000.bin")
    for step in first.state.steps(9):
        loss = first.step()
        found = kept.get(step + 1)
        assert found is not None
        assert found.final or step == 0, "a rank lost here would have no private state to resume from"
        first.state.commit(loss=loss)
    assert "private to each rank" not in capfd.readouterr().err
    assert first.state._protection is not None
    assert first.state._protection.snapshot_just_in_time(SELDOM.generation).whole
    again = Averaged(resumed(memory, first, SELDOM, 9))
    assert again.ema.n_averaged == 9
    assert again.run(12).bits() == Averaged(alone()).run(12).bits()


def test_the_count_of_an_average_is_restored_from_the_private_state_of_an_earlier_version() -> None:
    average = AveragedModel(torch.nn.Linear(2, 2))
    private = PrivateState({"ema": average}, {}, torch.device("cpu"))
    assert not [name for name, _ in private.core() if name.startswith("buffer:")]
    count = torch.tensor(7).numpy().tobytes()
    private.restore(private.blob([*private.core(), ("buffer:ema.n_averaged", count)]))
    assert average.n_averaged == 7


class Normed(Script):
    """A script with an average of a model that has buffers."""

    def __init__(self, session: Session, use_buffers: bool = False) -> None:
        torch.manual_seed(0)
        layers = [
            torch.nn.Linear(4, 8),
            torch.nn.BatchNorm1d(8),
            torch.nn.BatchNorm1d(8),
            torch.nn.Linear(8, 1),
        ]
        self.model = torch.nn.Sequential(*layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.ema = AveragedModel(self.model, use_buffers=use_buffers)
        self.state = session.protect(model=self.model, optimizer=self.optimizer, ema=self.ema)
        self.every = 1

    def step(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss: torch.Tensor = self.model(torch.randn(6, 4)).pow(2).mean()
        loss.backward()
        self.optimizer.step()
        if self.state.step % self.every == 0:
            self.ema.update_parameters(self.model)
        return loss

    def bits(self) -> list[Any]:
        values = [
            *self.ema.parameters(),
            *self.ema.buffers(),
            *self.model.parameters(),
            *self.model.buffers(),
        ]
        return [each.tolist() for each in values]


def core_of(blob: bytes) -> dict[str, bytes]:
    """Return everything except the loss guard's history, which learns the step's loss at its commit."""
    return {name: content for name, content in parse_sections(blob).items() if not name.startswith("guard:")}


def test_buffers_that_an_average_copies_are_final_before_they_are_copied(
    memory: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = Normed(supervised(memory, SELDOM))
    kept = PrivateReader(memory / "arena" / "private-00000.bin")
    for step in script.state.steps(9):
        loss = script.step()
        found = kept.get(step + 1)
        assert found is not None
        assert found.final or step < 2, "the first step shows the copying, the second its repetition"
        script.state.commit(loss=loss)
        if step >= 2:
            assert core_of(found.data) == dict(script.state._private.core())
    assert capfd.readouterr().err == ""
    assert script.state._protection is not None
    assert script.state._protection.snapshot_just_in_time(SELDOM.generation).whole
    again = Normed(resumed(memory, script, SELDOM, 9))
    assert again.run(20).bits() == Normed(alone()).run(20).bits()


@pytest.mark.parametrize(("use_buffers", "every"), [(True, 1), (False, 3)], ids=["averaged", "at times"])
def test_buffers_that_are_not_copied_are_stored_again_at_the_commit_and_named_with_what_to_do(
    memory: Path, capfd: pytest.CaptureFixture[str], use_buffers: bool, every: int
) -> None:
    script = Normed(supervised(memory, SELDOM), use_buffers)
    script.every = every
    kept = PrivateReader(memory / "arena" / "private-00000.bin")
    for step in script.state.steps(20):
        script.state.commit(loss=script.step())
        found = kept.get(step + 1)
        assert found is not None
        assert found.final
        assert core_of(found.data) == dict(script.state._private.core())
    said = capfd.readouterr().err
    assert said.count("changes between") == 1
    assert "as in an AveragedModel without use_buffers" in said or every == 3


@pytest.mark.parametrize("use_buffers", [True, False], ids=["averaged", "copied"])
def test_buffers_that_an_average_changes_after_the_commit_belong_to_that_step(
    memory: Path, capfd: pytest.CaptureFixture[str], use_buffers: bool
) -> None:
    def trained(session: Session, until: int) -> Normed:
        script = Normed(session, use_buffers)
        script.every, first = 1000, script.state.step
        for step in script.state.steps(until):
            if script.state._protection is not None and step >= first + 4 and use_buffers:
                found = PrivateReader(memory / "arena" / "private-00000.bin").get(step)
                assert found is not None
                assert found.final
                assert core_of(found.data) == dict(script.state._private.core())
            loss = script.step()
            script.state.commit(loss=loss)
            if script.state._protection is not None and step >= first + 4:
                found = PrivateReader(memory / "arena" / "private-00000.bin").get(step + 1)
                assert found is not None
                assert found.final is not use_buffers, "a change after the commit is part of the step"
            script.ema.update_parameters(script.model)
        return script

    launch = replace(SELDOM, snapshot_every=4)
    script = trained(supervised(memory, launch), 9)
    said = capfd.readouterr().err
    assert said.count("is changed after commit()") == use_buffers
    assert trained(resumed(memory, script, launch, 8), 30).bits() == trained(alone(), 30).bits()


def test_buffers_that_an_early_evaluation_changes_do_not_count_as_those_of_an_average(
    memory: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = Normed(supervised(memory, SELDOM))
    for step in script.state.steps(8):
        script.state.commit(loss=script.step())
        if step in (0, 3):
            script.model(torch.randn(6, 4))  # without eval()
        found = PrivateReader(memory / "arena" / "private-00000.bin").get(step + 1)
        assert found is not None
        assert found.final
    assert "is changed after commit()" not in capfd.readouterr().err


def test_private_state_that_changes_too_late_is_named_with_its_cost(
    memory: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = Script(supervised(memory, SELDOM))
    for _ in script.state.steps(4):
        loss = script.step()
        script.data.at += 1
        script.state.commit(loss=loss)
    said = capfd.readouterr().err
    assert said.count("data changes between optimizer.step() and commit()") == 1
    assert "costs the steps since the last snapshot" in said


@pytest.mark.parametrize("late", ["data", "buffer"])
def test_private_state_that_changes_before_each_commit_does_not_hide_a_change_after_one(
    memory: Path, late: str
) -> None:
    """For example a meter of the loss, or an average of buffers."""
    script = Script(supervised(memory, replace(SELDOM, snapshot_every=8)))
    best = script.data
    for _ in script.state.steps(20):
        loss = script.step()
        if late == "buffer":
            next(script.model.buffers()).add_(1)
        else:
            best.at += 1
        script.state.commit(loss=loss)
        if script.state.step % 8 == 0:
            with script.state.pause("eval"):
                pass
            best.at += 100
    assert page_of(memory).late == (8, 16)
    assert not steps_of(script) & {8, 16}


def test_a_change_before_the_optimizer_is_named_once(memory: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = Script(supervised(memory, SELDOM))
    for step in script.state.steps(6):
        if step:
            script.scheduler.step()
        script.state.commit(loss=script.step())
    assert capfd.readouterr().err.count("before optimizer.step(): a fault at that point") == 1


def test_a_gradient_scaler_is_not_a_change_before_the_optimizer(
    memory: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    state = supervised(memory, SELDOM).protect(
        model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler
    )
    for step in state.steps(6):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, 4)).sum() * (math.inf if step == 2 else 1.0)).backward()
        scaler.step(optimizer)  # skipped in step 2
        scaler.update()
        scheduler.step()
        state.commit()
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("changed", ["scheduler", "best", "nothing"])
def test_a_change_by_an_evaluation_after_the_commit_is_named_once(
    memory: Path, capfd: pytest.CaptureFixture[str], changed: str
) -> None:
    script = Script(supervised(memory, SELDOM))
    for step in script.state.steps(12):
        script.state.commit(loss=script.step())
        if step % 4 == 3:
            with script.state.pause("eval"):
                script.model(torch.randn(2, 4))
            if changed == "scheduler":
                script.scheduler.step()
            elif changed == "best":
                script.data.at += 1
    said = capfd.readouterr().err
    assert said.count("after the commit of step 4 and before the next step") == (changed != "nothing")
    assert said.count("before the next step") == (changed != "nothing")
    assert ("scheduler was changed" in said, "data was changed" in said) == (
        changed == "scheduler",
        changed == "best",
    )


def evaluating(script: Script, until: int, changed: str, boundary: int = 4) -> Script:
    """Train; after every `boundary` commits, evaluate and change something."""
    for _ in script.state.steps(until):
        script.state.commit(loss=script.step())
        if script.state.step % boundary == 0:
            with script.state.pause("eval"):
                script.model.eval()(torch.randn(2, 4))
                script.model.train()
            if changed == "scheduler":
                script.scheduler.step()
            elif changed == "rate":
                script.optimizer.param_groups[0]["lr"] *= 0.5
            elif changed == "weights":
                with torch.no_grad():
                    next(script.model.parameters()).mul_(0.5)
            elif changed == "data":
                script.data.at += 1
    return script


def beginning(script: Script, until: int) -> Iterator[int]:
    """Yield each step when it begins; change private state after every eighth commit."""
    for step in script.state.steps(until):
        yield step
        script.state.commit(loss=script.step())
        if script.state.step % 8 == 0:
            with script.state.pause("eval"):
                pass
            script.data.at += 1


@pytest.mark.parametrize("boundary", [4, 1], ids=["at times", "after each commit"])
@pytest.mark.parametrize("changed", ["scheduler", "rate", "weights"])
def test_a_change_of_replicated_state_after_a_commit_is_in_the_snapshot_of_that_step(
    memory: Path, changed: str, boundary: int
) -> None:
    launch = replace(SELDOM, snapshot_every=4)
    undisturbed = evaluating(Script(alone()), 20, changed, boundary).bits()
    script = evaluating(Script(supervised(memory, launch)), 9, changed, boundary)
    found = page_of(memory)
    assert 8 in found.amended
    assert found.late == ()
    again = Script(resumed(memory, script, launch, 8))
    assert evaluating(again, 20, changed, boundary).bits() == undisturbed


def test_no_snapshot_is_kept_of_a_step_whose_private_state_changes_after_the_commit(memory: Path) -> None:
    script = Script(supervised(memory, replace(SELDOM, snapshot_every=8)))
    found = {step: steps_of(script) for step in beginning(script, 21)}
    assert page_of(memory).late == (8, 16)
    assert found[8] == {4}
    assert found[9] == found[15] == {4, 9}, "the next step is copied in its place"
    assert found[17] == found[20] == {9, 17}
    for step in (9, 17):
        held = PrivateReader(memory / "arena" / "private-00000.bin").get(step)
        assert held is not None
        assert held.final


@settings(max_examples=20, deadline=None)
@given(void=st.sets(st.integers(5, 40)), shared=st.sets(st.integers(1, 40)))
@example(void={*range(5, 12), 16, 24, 32}, shared={*range(1, 8), 15, 23, 31})
def test_a_void_snapshot_is_replaced_by_one_of_the_first_step_that_is_not_void(
    void: set[int], shared: set[int]
) -> None:
    """This holds at any step, whatever else changes after a commit, and without unnecessary copies."""
    with memory_directory() as memory:
        session = supervised(memory, replace(SELDOM, snapshot_every=8))
        copies: list[int] = []
        assert session._rank.page is not None
        session._rank.page.note_snapshot = lambda step, *_: copies.append(step)  # type: ignore[method-assign]
        script = Script(session)
        kept = PrivateReader(memory / "arena" / "private-00000.bin")
        for step in script.state.steps(41):
            late = set(page_of(memory).late)
            due = max(each for each in (0, FIRST_AFTER_STEPS, step - step % 8) if each <= step)
            good = next((each for each in range(due, step + 1) if each not in late), 0)
            there = steps_of(script)
            assert max(there) >= good, f"of step {good} there is no snapshot at the beginning of {step}"
            assert not there & late
            for each in there:
                found = kept.get(each)
                assert found is not None
                assert found.final
            script.state.commit(loss=script.step())
            if script.state.step in void:
                with script.state.pause("eval"):
                    pass
                script.data.at += 1
            if script.state.step in shared:
                script.scheduler.step()
        others = {each for each in copies if each % 8}  # some twice, to include a change after the commit
        # One soon after the start and one in the first pause, each with a replacement, and one at the end.
        most = 5 + len(void & set(range(8, 41, 8)))
        assert len(others) <= most, "at most one for each"


def test_few_copies_are_made_if_every_step_is_void(memory: Path) -> None:
    session = supervised(memory, replace(SELDOM, snapshot_every=8))
    copies: list[int] = []
    assert session._rank.page is not None
    session._rank.page.note_snapshot = lambda step, *_: copies.append(step)  # type: ignore[method-assign]
    script = Script(session).run(5)
    del copies[:]
    evaluating(script, 41, "data", 1)
    late = page_of(memory).late
    assert late == tuple(range(6, 14))
    assert copies == [5, 6, 8, 9, 14, 16, 24, 32, 40, 41], "5, 9 and 41: begin, soon, end; 6: before a pause"


def test_a_snapshot_that_was_dropped_for_another_rank_is_taken_again_at_the_next_step(memory: Path) -> None:
    """The sidecar drops it on an order; the rank is not informed."""
    session = supervised(memory, replace(SELDOM, snapshot_every=16))
    copies: list[int] = []
    assert session._rank.page is not None
    session._rank.page.note_snapshot = lambda step, *_: copies.append(step)  # type: ignore[method-assign]
    script = Script(session)
    assert script.state._protection is not None
    arena = script.state._protection.snapshots.arena
    for step in script.state.steps(60):
        if step == 58:
            break
        if step in (17, 33, 49, 54):
            arena.forget(arena.records()[0])
        script.state.commit(loss=script.step())
    kept = PrivateReader(memory / "arena" / "private-00000.bin")
    assert copies == [0, 4, 16, 18, 32, 34, 48, 50, 55]
    assert all(kept.get(step) is not None for step in steps_of(script))


def test_a_step_that_another_rank_made_void_replaces_no_good_snapshot(memory: Path) -> None:
    """The other rank's page shows this before the sidecar has noticed it."""
    launch = replace(SELDOM, nproc=2, snapshot_every=16)
    other = Page.create(memory / "page-1.bin")
    script = Script(supervised(memory, launch))
    other.begin(launch.generation - 1, 1, 1, 1, 0)
    other.note_late(4, amended=False)  # written by an earlier generation
    for step in script.state.steps(60):
        if step == 5:
            other.begin(launch.generation, 1, 1, 1, 0)
        if step in (16, 32):
            assert step in steps_of(script)
            other.note_late(step, amended=False)
        if step == 40:
            assert steps_of(script) == {4, 32}
        if step == 49:
            assert steps_of(script) == {4, 48}
            break
        script.state.commit(loss=script.step())


def test_a_snapshot_that_is_being_read_when_its_step_becomes_void_replaces_no_other(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Script(supervised(memory, replace(SELDOM, snapshot_every=8)))
    assert script.state._protection is not None
    arena = script.state._protection.snapshots.arena
    with ExitStack() as reading:
        copy = script.state._protection.snapshots._copy_now

        def read(step: int, over_newer: bool) -> None:
            copy(step, over_newer)
            if step == 8:
                reading.enter_context(arena.pin(arena.records()[0]))

        monkeypatch.setattr(script.state._protection.snapshots, "_copy_now", read)
        for step in beginning(script, 20):
            if step == 10:
                assert steps_of(script) == {4, 8}, "the other snapshot is the only usable one"
                reading.close()
            if step == 12:
                assert steps_of(script) == {4, 12}
                break


def test_private_state_that_changes_after_every_commit_does_not_prevent_snapshots(
    memory: Path,
) -> None:
    """It did not change in the first steps, so it does not count as a loader that prefetches."""
    script = Script(supervised(memory, replace(SELDOM, snapshot_every=4)))
    script.run(5)
    evaluating(script, 40, "data", 1)
    assert page_of(memory).late == tuple(range(6, 14))
    assert steps_of(script) == {36, 40}


@pytest.mark.parametrize("changed", ["scheduler", "data"])
def test_a_skipped_batch_does_not_hide_a_change_after_the_previous_commit(
    memory: Path, capfd: pytest.CaptureFixture[str], changed: str
) -> None:
    launch = replace(SELDOM, snapshot_every=4, skip=(4,))
    script = Script(supervised(memory, launch))
    seen = []
    for step in script.state.steps(7):
        seen.append(step)
        script.state.commit(loss=script.step())
        if step == 3:
            if changed == "scheduler":
                script.scheduler.step()
                state = script.scheduler.state_dict()
            else:
                script.data.at += 1
    assert seen == [0, 1, 2, 3, 5, 6]
    assert capfd.readouterr().err.count("after the commit of step 4 and before the next step") == 1
    if changed == "scheduler":
        assert Script(resumed(memory, script, launch, 4)).scheduler.state_dict() == state
    else:
        assert page_of(memory).late == (4,)
        assert 4 not in steps_of(script)


@pytest.mark.parametrize("first", [1, 2, 4])
def test_early_changes_by_an_evaluation_without_a_pause_do_not_count_as_a_prefetching_loader(
    memory: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    monkeypatch.setattr(late_changes, "LONG_S", 0.0)  # all work after a commit counts as an evaluation
    script = Script(supervised(memory, replace(SELDOM, snapshot_every=4)))
    for _ in script.state.steps(22):
        script.state.commit(loss=script.step())
        if script.state.step % 10 == first:
            script.data.at += 1
    assert {10 + first, 20 + first} & set(range(22)) <= set(page_of(memory).late)
    assert capfd.readouterr().err.count("data was changed after the commit of step") == 1


def test_private_state_that_changes_after_each_of_the_first_commits_counts_as_a_prefetching_loader(
    memory: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(late_changes, "LONG_S", 0.0)
    script = Script(supervised(memory, replace(SELDOM, snapshot_every=4)))
    for _ in script.state.steps(12):
        script.state.commit(loss=script.step())
        script.data.at += 1
    assert page_of(memory).late == ()
    assert steps_of(script) == {8, 12}
    assert capfd.readouterr().err == ""


def test_a_private_part_of_a_scheduler_that_steps_after_each_commit_is_named(
    memory: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = Script(supervised(memory, replace(SELDOM, snapshot_every=4)))
    for step in script.state.steps(12):
        script.state.commit(loss=script.step())
        script.data.at += 1
        script.optimizer.param_groups[0]["lr"] = 0.01 / (step + 1)
    said = capfd.readouterr().err
    assert said.count("data, private to a rank, is also changed after each commit") == 1
    assert "holdfast_private = False" in said


def test_no_copy_is_made_just_in_time_of_a_state_that_lacks_a_change(memory: Path) -> None:
    script = Script(supervised(memory, replace(SELDOM, snapshot_every=0)))
    evaluating(script, 8, "data")
    assert page_of(memory).late == (4, 8), "changes must also be found at the end of the loop"
    assert script.state._protection is not None
    answer = script.state._protection.snapshot_just_in_time(SELDOM.generation)
    assert (answer.whole, answer.why) == (False, "changed after its commit")


def test_a_copy_that_was_made_just_in_time_before_the_change_is_void(memory: Path) -> None:
    """The group is secured while the script evaluates; a change after that is too late."""
    script = Script(supervised(memory, replace(SELDOM, snapshot_every=0)))
    assert script.state._protection is not None
    for step in script.state.steps(9):
        if step == 8:
            break
        script.state.commit(loss=script.step())
        if step == 7:
            assert script.state._protection.snapshot_just_in_time(SELDOM.generation).whole
            script.scheduler.step()
    assert 8 in steps_of(script)
    assert page_of(memory).late == (8,)


def test_a_loader_that_draws_before_the_step_begins_is_not_named(
    memory: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = Script(supervised(memory, SELDOM))
    for step in script.state.steps(12):
        script.state.commit(loss=script.step())
        if step % 4 == 3:
            with script.state.pause("eval"):
                pass
        script.data.at += 1
    assert "before the next step" not in capfd.readouterr().err


def test_an_evaluation_at_the_beginning_of_a_step_causes_no_warning(
    memory: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = Script(supervised(memory, SELDOM))
    for step in script.state.steps(10):
        if step % 4 == 3:
            with script.state.pause("eval"):
                pass
            script.data.at += 1
        loss = script.step()
        if step % 4 == 3:
            script.scheduler.step()
        script.state.commit(loss=loss)
    said = capfd.readouterr().err
    assert "before the next step" not in said
    assert "private to each rank" not in said


def test_a_buffer_that_is_written_through_data_after_the_optimizer_is_stored_with_its_new_value(
    memory: Path,
) -> None:
    """The buffers of an average are written from a late step on, and no version counter moves."""
    script = Script(supervised(memory, SELDOM)).run(12)
    mean = script.model[1].running_mean
    assert isinstance(mean, torch.Tensor)
    for _ in script.state.steps(13):
        loss = script.step()
        before = mean._version
        mean.data.copy_(torch.full_like(mean, 5.0))
        assert mean._version == before
        script.state.commit(loss=loss)
    kept = PrivateReader(memory / "arena" / "private-00000.bin").get(13)
    assert kept is not None
    assert kept.final
    assert kept.data == script.state._private.collect()


def test_large_buffers_are_named_once_with_their_size(
    memory: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = Script(supervised(memory, replace(SELDOM, snapshot_budget=0.001)), mask_bytes=16 << 20).run(20)
    said = capfd.readouterr().err
    assert said.count("s step, because buffers are read") == 1
    assert "model.mask of 16.8 MB" in said
    assert "persistent=False" in said
    assert script.state.step == 20


@pytest.mark.parametrize("kind", [torch.complex64, torch.uint32], ids=str)
def test_parameters_of_an_unsupported_type_are_refused_by_protect(memory: Path, kind: torch.dtype) -> None:
    model = torch.nn.Linear(2, 2)
    model.odd = torch.nn.Parameter(torch.zeros(2).to(kind), requires_grad=False)
    with pytest.raises(BadInput, match=rf"^model\.odd: a tensor of type {kind} cannot be stored in a"):
        supervised(memory, SELDOM).protect(model=model)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_a_quantized_buffer_is_refused_by_protect(memory: Path) -> None:
    model = torch.nn.Linear(2, 2)
    model.register_buffer(
        "table", torch._empty_affine_quantized([2], scale=0.1, zero_point=0, dtype=torch.qint8)
    )
    with pytest.raises(BadInput, match=r"^model\.table: a buffer of type torch\.qint8 cannot be stored"):
        supervised(memory, SELDOM).protect(model=model)


@contextmanager
def other_weights(script: Script) -> Iterator[None]:
    """Use other weights for a while, as averaging libraries do: no version counter shows it."""
    kept = [each.data.clone() for each in script.model.parameters()]
    for each in script.model.parameters():
        each.data.copy_(each.data + 1)
    yield
    for each, old in zip(script.model.parameters(), kept, strict=True):
        each.data.copy_(old)


@pytest.mark.parametrize("defers", [False, True])
def test_a_copy_that_is_refused_during_a_tail_is_made_before_the_tail_counts_as_over(
    memory: Path, defers: bool
) -> None:
    """The supervisor waits only until the tail is over, and a rank without peers makes no further step.

    With `defers`, the script has changed its state in the tail of the step before.
    """
    held: list[set[int]] = []
    session = supervised(memory, SELDOM)
    script = Script(session)
    kept = script.state._protection
    assert kept is not None
    for _ in script.state.steps(6):
        script.state.commit(loss=script.step())
        if script.state.step < 5:
            continue
        kept.snapshots.defers = defers
        with other_weights(script):
            answer = kept.snapshot_just_in_time(session.generation)
        assert not answer.whole
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Page, "tail_is_over", lambda _: held.append(steps_of(script)))
            script.state._training.end_tail()
        assert held == [{4, 5}]
        break


def test_a_rank_whose_copy_was_refused_copies_nothing_once_its_tail_is_over(memory: Path) -> None:
    """The group may already resume from a snapshot that the copy would overwrite."""
    session = supervised(memory, SELDOM)
    script = Script(session)
    kept = script.state._protection
    assert kept is not None
    for _ in script.state.steps(6):
        script.state.commit(loss=script.step())
        if script.state.step < 5:
            continue
        with other_weights(script):
            assert not kept.snapshot_just_in_time(session.generation).whole
            script.state._training.end_tail()
        assert kept.last_copies.before_exit() is None
        assert steps_of(script) == {0, 4}
        break


def test_an_exception_in_a_tail_leaves_a_copy_even_if_one_was_refused_before(memory: Path) -> None:
    session = supervised(memory, SELDOM)
    script = Script(session)
    kept = script.state._protection
    assert kept is not None
    for _ in script.state.steps(6):
        script.state.commit(loss=script.step())
        if script.state.step < 5:
            continue
        with other_weights(script):
            assert not kept.snapshot_just_in_time(session.generation).whole
        answer = kept.last_copies.before_exit()
        assert answer is not None
        assert answer.whole
        break

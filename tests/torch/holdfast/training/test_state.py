from __future__ import annotations

import math
import os
import random
import socket
import threading
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.errors import BadInput, NumericFault
from holdfast.protocol import progress, progress_writer
from holdfast.protocol.launcher_messages import Launch, LossJump, RankStart, Restore
from holdfast.snapshot.private_store import PrivateStore
from holdfast.training import session as joining
from holdfast.training.session import Session
from holdfast.training.state import State
from holdfast.worker import script as ending
from holdfast.worker.launcher_channel import LauncherChannel
from tests.torch.holdfast.simulated_device import Simulated

torch.set_num_threads(1)  # more threads only slow down tensors of this size

LAUNCH = Launch(3, 1, 1, "", 0, 0, 0.0)


class Position:
    def __init__(self) -> None:
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Script:
    """A training script: a model with dropout and batch norm, and data that depends on its position."""

    def __init__(self, session: Session, mask_bytes: int = 0) -> None:
        torch.manual_seed(0)
        random.seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))
        if mask_bytes:
            self.model.register_buffer("mask", torch.ones(mask_bytes, dtype=torch.uint8))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3)
        self.data = Position()
        self.state: State = session.protect(
            model=self.model, optimizer=self.optimizer, scheduler=self.scheduler, data=self.data
        )

    def step(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        batch = torch.randn(6, 4) * random.random() + self.data.at
        loss: torch.Tensor = self.model(batch).pow(2).mean()
        loss.backward()
        self.data.at += 6
        self.optimizer.step()
        self.scheduler.step()
        return loss

    def run(self, until: int) -> Script:
        for _ in self.state.steps(until):
            self.state.commit(loss=self.step())
        return self

    def bits(self) -> list[Any]:
        """Return the complete state that training depends on."""
        return [self.written(), self.scheduler.state_dict(), self.state._private.core()]

    def written(self) -> list[Any]:
        """Return the part of the state that the optimizer writes."""
        tensors = [*self.model.parameters()]
        tensors += [t for values in self.optimizer.state.values() for t in values.values()]
        return [t.detach().clone().view(-1).view(torch.uint8).tolist() for t in tensors]


def alone(launch: Launch = LAUNCH) -> Session:
    """Return a session without a supervisor."""
    return Session(launch, RankStart(0, 0), None)


# -- the loop


def test_steps_count_when_they_are_committed() -> None:
    script = Script(alone())
    seen = []
    for step in script.state.steps(6):
        seen.append(step)
        if len(seen) in (2, 4):
            continue  # an unusable batch: the same step again
        script.state.commit(loss=script.step())
    assert seen == [0, 1, 1, 2, 2, 3, 4, 5]
    assert script.state.step == 6
    assert list(script.state.steps(6)) == []


def test_a_step_whose_optimizer_ran_but_that_was_not_committed_is_an_error() -> None:
    script = Script(alone())
    steps = script.state.steps(3)
    next(steps)
    script.step()
    with pytest.raises(BadInput, match=r"step 0 was not committed: call state\.commit"):
        next(steps)


def test_an_optimizer_that_steps_after_the_commit_is_an_error_at_its_line() -> None:
    script = Script(alone())
    steps = script.state.steps(3)
    next(steps)
    script.state.commit()
    with pytest.raises(
        BadInput, match=r"step\(\) was called after commit\(\) in step 0: call commit\(\) after"
    ):
        script.step()


def test_a_step_without_an_optimizer_can_also_be_committed() -> None:
    script = Script(alone())
    for _ in script.state.steps(3):
        script.state.commit()
    assert script.state.step == 3


def test_bad_batches_are_skipped_without_running_the_loop() -> None:
    script = Script(alone(replace(LAUNCH, skip=(0, 2, 3))))
    seen = []
    for step in script.state.steps(5):
        seen.append(step)
        script.state.commit(loss=1.0)
    assert seen == [1, 4]
    assert script.state.step == 5


def test_no_state_is_whole_from_the_optimizers_first_write_to_the_commit() -> None:
    script = Script(alone())
    for _ in script.state.steps(2):
        assert not script.state._training.is_writing
        loss = script.step()
        assert script.state._training.is_writing
        assert script.state._gate.whole_state() is None
        script.state.commit(loss=loss)
        found = script.state._gate.whole_state()
        assert found is not None
        assert found.step == script.state.step


def test_a_pause_restores_the_generators_that_its_draws_changed() -> None:
    script = Script(alone())
    with script.state.pause("eval"):
        drawn = torch.rand(1), random.random()
    assert (torch.rand(1), random.random()) == drawn
    with pytest.raises(KeyError), script.state.pause("eval"):
        raise KeyError
    assert torch.rand(1) != drawn[0]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"loss": math.nan}, r"step 2: loss nan is not a number \(batch position 7\)"),
        ({"loss": torch.tensor(math.inf)}, "is infinite"),
    ],
)
def test_bad_numbers_raise_without_a_supervisor(given: dict[str, Any], why: str) -> None:
    script = Script(alone()).run(2)
    steps = script.state.steps(5)
    next(steps)
    script.step()
    with pytest.raises(NumericFault, match=why):
        script.state.commit(position=7, **given)
    assert script.state.step == 2


class Skips(torch.optim.SGD):
    """Skips a step whose gradients overflowed, as an optimizer with its own loss scale does."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        if all(bool(torch.isfinite(grad).all()) for grad in grads if grad is not None):
            super().step(closure)


def overflows(kind: type[torch.optim.Optimizer], how: str) -> State:
    """Train with a gradient that is infinite in step 1 of 4, at good losses."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model.register_buffer("mask", torch.full((3,), -math.inf))
    optimizer = kind(model.parameters(), lr=0.1)  # type: ignore[call-arg]
    state: State = alone().protect(model=model, optimizer=optimizer)
    for step in state.steps(4):
        if step == 1 and how == "running average":
            model(torch.full((3, 4), math.inf))
        optimizer.zero_grad()
        model(torch.randn(3, 4)).pow(2).mean().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        if step == 1:
            norm = torch.tensor(math.inf)
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad.fill_(math.nan if how == "nan" else math.inf)
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.step()
        if how == "undone" and step == 1:
            with torch.no_grad():
                for parameter, value in zip(model.parameters(), before, strict=True):
                    parameter.copy_(value)
        state.commit(loss=1.0, grad_norm=norm)
    return state


@pytest.mark.parametrize(("kind", "how"), [(Skips, "inf"), (Skips, "nan"), (torch.optim.SGD, "undone")])
def test_bad_gradients_that_never_reach_the_state_are_no_fault(
    kind: type[torch.optim.Optimizer], how: str
) -> None:
    assert overflows(kind, how).step == 4


@pytest.mark.parametrize(
    ("kind", "how"), [(torch.optim.SGD, "inf"), (torch.optim.AdamW, "nan"), (Skips, "running average")]
)
def test_bad_gradients_that_reach_the_state_are_a_fault(kind: type[torch.optim.Optimizer], how: str) -> None:
    with pytest.raises(NumericFault, match="step 1"):
        overflows(kind, how)


@pytest.mark.parametrize("loss", [1.0, 50.0])
def test_the_guard_does_not_learn_the_loss_of_a_step_with_bad_gradients(
    loss: float, capsys: pytest.CaptureFixture[str]
) -> None:
    script = Script(alone())
    for _ in script.state.steps(20):
        script.step()
        script.state.commit(loss=1.0)
    guard = script.state._private._guard
    assert guard is not None
    before = list(guard.learned()["losses"])
    assert len(before) == 20
    steps = script.state.steps(21)
    next(steps)
    script.optimizer.zero_grad()
    script.model(torch.full((6, 4), math.nan)).sum().backward()
    script.optimizer.step()
    with pytest.raises(NumericFault, match=f"step 20: loss {loss:g} is not a number"):
        script.state.commit(loss=loss)
    assert list(guard.learned()["losses"]) == before
    assert "training continues" not in capsys.readouterr().err  # which a jump alone would cause


def test_a_loss_jump_is_judged_by_the_losses_before_it() -> None:
    script = Script(alone(replace(LAUNCH, loss_jump_fault=True)))
    for step in script.state.steps(30):
        script.state.commit(loss=1.0 + step / 100)
    steps = script.state.steps(31)
    next(steps)
    with pytest.raises(NumericFault, match=r"step 30: loss 1e\+06 is far above the recent ones"):
        script.state.commit(loss=1e6)
    quiet = Script(alone(replace(LAUNCH, loss_jump=0.0, loss_jump_fault=True)))
    for step in quiet.state.steps(40):
        quiet.state.commit(loss=1.0 if step < 30 else 1e6)


def test_a_loss_jump_is_warned_of_once_per_step(capsys: pytest.CaptureFixture[str]) -> None:
    script = Script(alone())
    for step in script.state.steps(40):
        script.state.commit(loss=1.0 + step / 100 if step != 30 else 50.0)
    (said,) = capsys.readouterr().err.splitlines()
    assert "loss 50 at step 30; last 30: median 1.145, highest 1.29; limit 2.257: training continues" in said


def test_a_loss_jump_that_recurs_with_the_same_value_after_a_rollback_is_accepted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    launch = replace(LAUNCH, loss_jump_fault=True, jumped=(LossJump(30, repr(50.0)),))
    script = Script(alone(launch))
    for step in script.state.steps(31):
        script.state.commit(loss=1.0 + step / 100 if step != 30 else 50.0)
    assert "it is accepted" in capsys.readouterr().err
    script = Script(alone(launch))
    for step in script.state.steps(30):
        script.state.commit(loss=1.0 + step / 100)
    steps = script.state.steps(31)
    next(steps)
    with pytest.raises(NumericFault, match="far above"):
        script.state.commit(loss=60.0)


# -- gradients that a scaler skips


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_a_scaler_skips_is_no_fault(fused: bool) -> None:
    """The scaler either does not call `optimizer.step()`, or a fused optimizer writes nothing."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    state = alone().protect(model=model, optimizer=optimizer, scaler=scaler)
    norms = []
    for _ in state.steps(6):
        loss = model(torch.full((1, 2), 100.0)).pow(2).mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1e9))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        state.commit(loss=loss.detach(), grad_norm=norms[-1])
    assert not math.isfinite(norms[0])
    assert state.step == 6


def test_objects_without_state_are_named() -> None:
    with pytest.raises(BadInput, match=r"protect\(data=\.\.\.\): the type int has no state_dict"):
        alone().protect(data=3)


# -- kept and restored, as a rank does it


class Unheard(socket.socket):
    """A socket to a launcher that is gone, so messages are lost."""

    def __init__(self) -> None:
        super().__init__()
        self.close()


def supervised(memory: Path, launch: Launch, private: str = "") -> Session:
    """Return a session as a launcher starts it, but without a process group: a single rank needs none."""
    session = Session(launch, RankStart(0, 0, private), LauncherChannel(Unheard(), memory, 0, 1))
    session._rank.page = progress_writer.Page.create(memory / "page-0.bin")
    session._rank.page.begin(launch.generation, 0, 0, 1, 0)
    return session


def resumed(memory: Path, script: Script, launch: Launch, step: int) -> Session:
    """Return the next generation's session, resumed from the arena's state of `step`."""
    keeping = script.state._protection
    assert keeping is not None
    [record] = [r for r in keeping.snapshots.arena.records() if r.step == step]
    blob = PrivateStore(memory / "arena" / "private-00000.bin", 0).get(step, launch.generation)
    assert blob is not None
    (memory / "private").write_bytes(blob.data)
    restore = Restore(step, launch.generation, "slot", str(record.path))
    again = replace(launch, generation=launch.generation + 1, restore=restore)
    return supervised(memory, again, str(memory / "private"))


def test_actions_of_a_forked_child_do_not_count_as_those_of_the_rank(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a child once used the rank's page and private store."""
    session = supervised(memory, replace(LAUNCH, snapshot_every=1))
    script = Script(session)
    monkeypatch.setattr(joining, "_joined", joining._Joined(os.getpid(), session))
    steps = script.state.steps(9)
    next(steps)
    script.state.commit(loss=script.step())
    next(steps)

    def shown() -> list[bytes]:
        return [each.read_bytes() for each in sorted(memory.rglob("*")) if each.is_file()]

    before = shown()
    child = os.fork()
    if child == 0:
        try:
            with script.state.pause("eval"):
                script.model(torch.zeros(6, 4))
            script.state.commit(loss=script.step())
            session._rank.note("this is the child")
            os._exit(3)
        finally:
            os._exit(4)
    assert os.WEXITSTATUS(os.waitpid(child, 0)[1]) == 3
    assert shown() == before
    script.state.commit(loss=script.step())
    assert script.state.step == 2
    assert shown() != before


def test_the_ending_of_a_rank_names_the_pause_that_its_exception_has_left() -> None:
    """The page does not show it, because it already shows what follows the pause."""
    script = Script(alone())
    for step in script.state.steps(2):
        script.step()
        script.state.commit()
        with pytest.raises(ConnectionResetError) as caught, script.state.pause("checkpoint"):
            raise ConnectionResetError(104, "Connection reset by peer")
        ended = ending.ending_of(caught.value, 5, "the traceback")
        assert ended is not None
        assert (ended.fail, ended.paused) == ("exception", step + 1)


def test_the_outer_pause_continues_after_an_inner_one(memory: Path) -> None:
    """The end of the inner pause once ended both, and the evaluation then counted as a hang."""
    session = supervised(memory, LAUNCH)
    script = Script(session)

    def shown() -> tuple[int, str, float]:
        found = progress.read((memory / "page-0.bin").read_bytes())
        assert found is not None
        return found.phase, found.pause_label, found.pause_limit_s

    with script.state.pause("eval", limit_s=600):
        assert shown() == (progress.Phase.EVAL, "eval", 600.0)
        with script.state.pause("checkpoint"):
            assert shown()[:2] == (progress.Phase.CHECKPOINT, "checkpoint")
        assert shown()[:2] == (progress.Phase.EVAL, "eval")
        with pytest.raises(KeyError), script.state.pause("checkpoint"):
            raise KeyError
        assert shown()[:2] == (progress.Phase.EVAL, "eval")
        assert 0.0 < shown()[2] < 600.0
        with script.state.pause("log"), script.state.pause("checkpoint"):
            pass
        assert shown()[:2] == (progress.Phase.EVAL, "eval")
    assert shown()[0] == progress.Phase.DATA


@pytest.mark.parametrize("every", [1, 4])
def test_a_resumed_run_ends_like_an_undisturbed_one(memory: Path, every: int) -> None:
    undisturbed = Script(alone()).run(11).bits()
    launch = replace(LAUNCH, snapshot_every=every)
    first = Script(supervised(memory, launch)).run(8)
    again = Script(resumed(memory, first, launch, 8))
    assert again.state.step == 8
    assert again.run(11).bits() == undisturbed


def test_a_state_secured_just_in_time_is_the_last_committed_one(memory: Path) -> None:
    undisturbed = Script(alone()).run(9).bits()
    first = Script(supervised(memory, LAUNCH)).run(5)  # only the first snapshot exists
    assert first.state._protection is not None
    answer = first.state._protection.snapshot_just_in_time(LAUNCH.generation)
    assert (answer.step, answer.whole) == (5, True)
    assert first.state._protection.snapshot_just_in_time(LAUNCH.generation + 1).whole is False
    assert Script(resumed(memory, first, LAUNCH, 5)).run(9).bits() == undisturbed


def test_the_state_of_a_rank_inside_the_optimizers_writes_is_never_saved(
    memory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = Script(supervised(memory, LAUNCH))
    keeping = script.state._protection
    assert keeping is not None
    for _ in script.state.steps(1):
        loss = script.step()
        keeping.last_copies.before_exit()
        assert [record.step for record in keeping.snapshots.arena.records()] == [0]
        said = capsys.readouterr().err
        assert said.startswith("holdfast: warning: rank 0: its state of step 0 was not copied: ")
        assert said.endswith("inside the optimizer's writes\n")
        found = progress.read((memory / "page-0.bin").read_bytes())
        assert found is not None
        assert found.write_seq % 2 == 1
        script.state.commit(loss=loss)
    answer = keeping.last_copies.before_exit()
    assert answer is not None
    assert (answer.step, answer.whole) == (1, True)
    assert [record.step for record in keeping.snapshots.arena.records()] == [1, 0]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("on_device", [False, True])
def test_on_a_device_a_step_has_no_own_time_if_the_host_did_not_wait_for_the_step_before(
    memory: Path, on_device: bool
) -> None:
    session = supervised(memory, LAUNCH)
    session._rank.accelerator = Simulated([15]) if on_device else None
    script = Script(session)
    sums = [0]
    for step in script.state.steps(6):
        loss = script.step()
        script.state.commit(loss=loss if step in (0, 4) else None)
        found = progress.read((memory / "page-0.bin").read_bytes())
        assert found is not None
        sums.append(found.forward_ns)
    counted = [after > before for before, after in pairwise(sums)]
    assert counted == ([True, True, False, False, False, True] if on_device else [True] * 6)


def test_a_secured_rank_no_longer_writes(memory: Path) -> None:
    script = Script(supervised(memory, LAUNCH)).run(2)
    assert script.state._protection is not None
    assert script.state._protection.snapshot_just_in_time(LAUNCH.generation).whole
    before = script.written()
    stuck = threading.Thread(target=script.run, args=(3,), daemon=True)
    stuck.start()
    stuck.join(0.05)
    assert stuck.is_alive()
    assert script.written() == before
    script.state._gate._is_frozen = False
    script.state._gate._may_write.release()
    stuck.join(10)
    assert not stuck.is_alive()


def test_the_error_about_another_model_names_the_source_of_the_snapshot(memory: Path) -> None:
    launch = replace(LAUNCH, snapshot_every=1)
    session = resumed(memory, Script(supervised(memory, launch)).run(2), launch, 2)
    other = nn.Linear(4, 4)
    with pytest.raises(
        BadInput, match=r"^slot step 2: the snapshot is from a different model: model\.weight is not"
    ):
        session.protect(model=other)


def test_a_file_that_is_no_snapshot_is_bad_input(memory: Path) -> None:
    path = memory / "replicated.safetensors"
    path.write_bytes(b"\x80\x04\x95pickle")
    restore = Restore(2, 1, "checkpoint", str(memory))
    session = supervised(memory, replace(LAUNCH, restore=restore))
    with pytest.raises(BadInput, match=r"^checkpoint .*: header length is"):
        Script(session)

"""Misuse of the API raises or warns immediately, and the message states the right way."""

from __future__ import annotations

import importlib
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import BadInput
from holdfast.protocol.launcher_messages import Launch, RankStart
from holdfast.training.misuse.loop_history import LoopHistory
from holdfast.training.misuse.unprotected import AddedGroups
from holdfast.training.session import Session
from holdfast.training.state import State
from holdfast.worker import nested_scripts
from tests.torch.holdfast.simulated_device import Simulated

torch.set_num_threads(1)


def alone() -> Session:
    return Session(Launch(3, 1, 1, "", 0, 0, 0.0, loss_jump=10.0), RankStart(0, 0), None)


def plain(**objects: Any) -> State:
    return alone().protect(**objects)


def committed(state: State, count: int) -> State:
    for _ in state.steps(count):
        state.commit()
    return state


def resumed_at(state: State, step: int) -> State:
    state.step = step
    state._loops = LoopHistory(step, state._rank.warn)
    return state


# -- out of order


def test_a_commit_before_or_after_the_loop_is_refused() -> None:
    state = plain()
    with pytest.raises(BadInput, match=r"commit\(\) outside a step: call it once in each step"):
        state.commit()
    committed(state, 3)
    with pytest.raises(BadInput, match="not before or after that loop"):
        state.commit(loss=1.0)
    assert state.step == 3


def test_a_second_commit_in_a_step_is_refused() -> None:
    state = plain()
    for _ in state.steps(2):
        state.commit()
        with pytest.raises(BadInput, match=rf"already called in step {state.step - 1}"):
            state.commit()
    assert state.step == 2


@pytest.mark.parametrize("after_commit", [False, True])
def test_a_loop_within_a_loop_is_refused(after_commit: bool) -> None:
    state = plain()
    outer = state.steps(4)
    next(outer)
    if after_commit:
        state.commit()
    place = "after the commit of" if after_commit else "in"
    with pytest.raises(
        BadInput, match=rf"called {place} step 0: loops over state.steps\(\) cannot be nested"
    ):
        next(iter(state.steps(6)))


def test_loops_may_follow_each_other() -> None:
    state = plain()
    for epoch in range(3):
        for step in state.steps(4 * (epoch + 1)):
            state.commit()
            if step == 5:
                break
    assert state.step == 12


def epochs(state: State, *counts: int) -> list[int]:
    """Return the number of steps of each loop that one line starts."""
    done = []
    for count in counts:
        before = state.step
        for _ in state.steps(count):
            state.commit()
        done.append(state.step - before)
    return done


def test_a_line_that_requests_the_steps_of_an_epoch_again_is_refused() -> None:
    state = plain()
    with pytest.raises(BadInput, match=r"steps\(50\) is the whole training, not one epoch.*steps\(3 \* 50\)"):
        epochs(state, 50, 50, 50)
    assert state.step == 50
    assert epochs(state, 60) == [10], "the mistake changed nothing"


def test_epochs_over_batches_are_also_refused() -> None:
    session = alone()
    state = session.protect()
    batches = holdfast.Batches(list(range(12)), 4, session, state)

    def train() -> None:
        for _ in range(3):
            for _step, _batch in batches.steps(len(batches)):
                state.commit()

    with pytest.raises(BadInput, match=r"steps\(3\) is the whole training.*if batches\.ends_epoch\(step\)"):
        train()
    assert state.step == 3


def test_a_line_that_requested_fewer_steps_before_may_have_none_left(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert epochs(plain(), *(min(4 * (epoch + 1), 10) for epoch in range(5))) == [4, 4, 2, 0, 0]
    assert epochs(resumed_at(plain(), 9), 4, 8, 10, 10) == [0, 0, 1, 0]
    assert "does nothing" not in capsys.readouterr().err


def test_another_loop_without_steps_left_is_warned_of_once(capsys: pytest.CaptureFixture[str]) -> None:
    state = committed(plain(), 6)
    assert list(state.steps(4)) == []
    assert list(state.steps(6)) == []
    [warning] = capsys.readouterr().err.splitlines()
    assert "steps(4) (test_misuse.py, line " in warning
    assert "does nothing, because 6 steps are done: n in steps(n) counts from the beginning" in warning
    assert "write steps(6 + 4)" in warning


def test_a_loader_that_ends_before_the_steps_do_is_not_refused(capsys: pytest.CaptureFixture[str]) -> None:
    state = plain()
    for _ in range(4):
        for _ in zip(range(3), state.steps(7), strict=False):
            state.commit()
    assert state.step == 7
    assert capsys.readouterr().err.count("does nothing") == 1


def test_a_resumed_process_skips_completed_steps(capsys: pytest.CaptureFixture[str]) -> None:
    state = resumed_at(plain(), 6)
    assert list(state.steps(4)) == []
    assert epochs(state, 6, 6) == [0, 0]
    assert capsys.readouterr().err == ""
    assert epochs(resumed_at(plain(), 6), 9, 9) == [3, 0], (
        "the check does not know the time before the resume"
    )
    assert "does nothing" in capsys.readouterr().err


def test_a_step_that_is_never_committed_is_refused_after_three_attempts() -> None:
    state = plain()
    seen = []
    steps = state.steps(4)
    for step in islice(steps, 4):
        seen.append(step)
        if step != 1:
            state.commit()
    assert seen == [0, 1, 1, 1]
    with pytest.raises(BadInput, match=r"step 1 began 3 times without a commit: .*--skip-bad-batches"):
        next(steps)


def test_a_second_protect_is_refused() -> None:
    session = alone()
    session.protect()
    with pytest.raises(BadInput, match=r"protect\(\) was already called"):
        session.protect()


def test_a_second_join_returns_the_same_session(monkeypatch: pytest.MonkeyPatch) -> None:
    joining = importlib.import_module("holdfast.training.session")
    monkeypatch.setattr(joining, "_joined", None)
    monkeypatch.setattr(Session, "_enter", lambda self: None)
    assert holdfast.join() is holdfast.join()


@pytest.mark.parametrize("handed_down", ["closed", "a file", "a socket of another kind", "no number"])
def test_join_is_refused_in_a_process_that_a_rank_has_started(
    handed_down: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """For example a worker of torchrun, which inherits the environment but not the descriptors."""
    joining = importlib.import_module("holdfast.training.session")
    monkeypatch.setattr(joining, "_joined", None)
    monkeypatch.setattr("holdfast.worker.launcher_channel.current_channel", None)
    with socket.socket() as other, (tmp_path / "file").open("w") as file:
        closed = os.dup(file.fileno())
        os.close(closed)
        descriptor = {"closed": closed, "a file": file.fileno(), "no number": "x"}.get(
            handed_down, other.fileno()
        )
        for name, value in (("START", "{}"), ("CONTROL", descriptor), ("DIRECTORY", tmp_path), ("NPROC", 1)):
            monkeypatch.setenv(f"HOLDFAST_{name}", str(value))
        with pytest.raises(BadInput, match=r"which Holdfast did not start: .*Pass the script itself"):
            holdfast.join()
        assert os.fstat(other.fileno()), "a foreign descriptor must stay open"


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_process_started_by_a_rank_is_no_group_of_one_while_the_run_continues(
    goes_on: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """For example a script that restarts itself: each rank would train alone."""
    joining = importlib.import_module("holdfast.training.session")
    monkeypatch.setattr(joining, "_joined", None)
    monkeypatch.setattr("holdfast.worker.launcher_channel.current_channel", None)
    monkeypatch.setattr(Session, "_enter", lambda self: None)
    folder = tmp_path if goes_on else tmp_path / "removed"
    for name, value in nested_scripts.rank_variables(folder, 1).items():
        monkeypatch.setenv(name, value)
    if goes_on:
        with pytest.raises(BadInput, match=r"which Holdfast did not start: .*=4 holdfast run"):
            holdfast.join()
    else:
        assert holdfast.join().world_size == 1
    assert nested_scripts.was_refused(folder, 1) == goes_on
    assert not nested_scripts.was_refused(folder, 0)
    nested_scripts.clear(folder, 1)
    assert not nested_scripts.was_refused(folder, 1), "the rank's next process has started nothing yet"


# -- the wrong values


def step_of(use: Callable[[State], object]) -> None:
    state = plain()
    steps = state.steps(3)
    next(steps)
    use(state)


@pytest.mark.parametrize(
    ("use", "said"),
    [
        (
            lambda s: s.commit(1.0, 3),
            r"commit\(\) was given int without a name: write commit\(loss, grad_norm=",
        ),
        (
            lambda s: s.commit(loss=torch.ones(16)),
            r"got a tensor with 16 elements; pass one number, such as loss\.mean",
        ),
        (lambda s: s.commit(loss="low"), r"commit\(loss='low'\): expected a number"),
        (lambda s: s.commit(grad_norm=[1.0]), r"commit\(grad_norm=\[1\.0\]\): expected a number"),
        (lambda s: s.commit(samples="a"), r"commit\(samples='a'\): expected a whole number"),
        (lambda s: s.commit(tokens=None), r"commit\(tokens=None\): expected a whole number"),
        (lambda s: s.commit(flops="1e9"), r"commit\(flops='1e9'\): expected a number"),
        (lambda s: s.commit(position=[3]), r"commit\(position=\[3\]\): expected a whole number"),
        (
            lambda s: s.commit(loss=1.0, lr=0.1, norm=2.0),
            r"commit\(\) has no argument lr, norm: write commit\(loss, grad_norm=\.\.\., samples=",
        ),
        (lambda s: s.pause(timeout=9).__enter__(), r'pause\(\) has no argument timeout: write pause\("eval"'),
        (lambda s: s.pause(5).__enter__(), r'pause\(5\): expected a label first, as in state\.pause\("eval"'),
        (lambda s: s.pause("eval", limit_s="long").__enter__(), r"pause\(limit_s='long'\): expected seconds"),
        (lambda s: s.pause("eval", limit_s=-1).__enter__(), r"pause\(limit_s=-1\): expected seconds"),
    ],
)
def test_a_wrong_value_says_what_is_right(use: Callable[[State], object], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        step_of(use)


def test_a_wrong_number_of_steps_says_what_is_right() -> None:
    with pytest.raises(BadInput, match=r"steps\('20'\): expected the number of steps of the whole training"):
        next(iter(plain().steps("20")))  # type: ignore[arg-type]
    with pytest.raises(BadInput, match=r"steps\(-1\): expected the number of steps of the whole training"):
        next(iter(plain().steps(-1)))
    assert list(plain().steps(0)) == []


def test_a_pause_needs_no_label() -> None:
    def paused(state: State) -> None:
        with state.pause():
            state._private.random()

    step_of(paused)


def test_a_pause_without_with_is_warned_of_once_per_line(capsys: pytest.CaptureFixture[str]) -> None:
    def paused(state: State) -> None:
        for _ in range(3):
            state.pause("eval")

    step_of(paused)
    line = paused.__code__.co_firstlineno + 2
    assert capsys.readouterr().err == (
        "holdfast: warning: state.pause('eval') has no effect without `with`"
        f" (test_misuse.py, line {line}): write `with state.pause('eval'):`\n"
    )


def test_a_pause_without_with_is_also_warned_of_if_only_rank_1_makes_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    session = Session(Launch(3, 2, 2, "", 0, 0, 0.0), RankStart(1, 1), None)
    session.protect(model=nn.Linear(2, 2)).pause("eval")
    assert "state.pause('eval') has no effect without `with`" in capsys.readouterr().err


async def _later() -> None: ...


def _generates() -> Iterator[int]:
    yield 1


async def _generates_later() -> AsyncIterator[int]:
    yield 1


@pytest.mark.parametrize(
    ("function", "kind"),
    [(_later, "an async"), (_generates, "a generator"), (_generates_later, "a generator")],
)
def test_a_pause_that_decorates_a_function_which_works_later_is_refused(
    function: Callable[..., object], kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name = function.__name__
    refused = rf"state\.pause\('eval'\) decorates {name}, which is {kind} function: .* Write `with state\.p"
    with pytest.raises(BadInput, match=refused):
        step_of(lambda state: state.pause("eval")(function))
    assert capsys.readouterr().err == ""


def test_a_pause_can_be_used_as_a_decorator_and_reused_later(capsys: pytest.CaptureFixture[str]) -> None:
    def paused(state: State) -> None:
        drawn: list[torch.Tensor] = []

        @state.pause("eval")
        def evaluate(count: int) -> int:
            """Draw."""
            drawn.append(torch.rand(count))
            return count

        assert (evaluate(2), evaluate(count=3), evaluate.__doc__) == (2, 3, "Draw.")
        assert drawn[0].equal(drawn[1][:2]), "draws in a pause change nothing"
        later = state.pause("checkpoint")
        for _ in range(2):
            with later, later, pytest.raises(KeyError), state.pause("save"):
                raise KeyError

    step_of(paused)
    assert capsys.readouterr().err == ""


def test_protect_accepts_only_named_objects() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(BadInput, match=r"given Linear, SGD without a name: write protect\(model=model"):
        alone().protect(model, torch.optim.SGD(model.parameters(), 0.1))


def test_a_missing_attribute_of_holdfast_names_the_object_that_has_it() -> None:
    with pytest.raises(AttributeError, match=r"session = holdfast\.join\(\), then session\.protect"):
        holdfast.protect  # noqa: B018
    with pytest.raises(AttributeError, match=r"then state\.commit"):
        holdfast.commit  # noqa: B018
    assert dir(holdfast) == sorted(holdfast.__all__)


class Odd:
    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"seen": [1, {"ids": self.value}]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({3, 4}, r"sampler\['seen'\]\[1\]\['ids'\] is a set"),
        (b"x", "is a bytes"),
        ({(1, 2): 3}, r"the key \(1, 2\)"),
    ],
)
def test_state_that_is_not_json_is_named_by_its_path(value: Any, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        plain(sampler=Odd(value))._private.collect()


def test_a_distributed_sampler_is_refused_with_an_alternative() -> None:
    data = torch.utils.data.TensorDataset(torch.ones(4))
    sampler: Any = torch.utils.data.DistributedSampler(data, num_replicas=1, rank=0)
    with pytest.raises(BadInput, match=r"a DistributedSampler does not record .*holdfast\.Batches"):
        plain(data=sampler)


# -- forgotten objects


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, protected: dict[str, Any]) -> None:
    state = plain(**protected)
    for _ in state.steps(3):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        state.commit()


def test_an_optimizer_that_is_not_protected_is_warned_of_once(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    trained(model, optimizer, {"model": model})
    said = capsys.readouterr().err
    assert (
        said.count("AdamW steps but is not protected, so a fault resets it: protect(..., optimizer=...)") == 1
    )
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize("protects_another", [False, True])
def test_a_trained_model_that_is_not_protected_is_warned_of_once(
    protects_another: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    other = {"model": nn.Linear(2, 2)} if protects_another else {}
    trained(model, optimizer, {"optimizer": optimizer, **other})
    said = capsys.readouterr().err
    assert said.count("AdamW trains 2 parameters, which belong to no protected module") == 1


def test_a_script_that_protects_everything_gets_no_warning(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    trained(model, optimizer, {"model": model, "optimizer": optimizer})
    assert capsys.readouterr().err == ""


def test_masters_that_belong_to_no_module_and_inner_optimizers_are_no_mistake(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = nn.Linear(2, 2)
    masters = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    outer = torch.optim.AdamW(masters)
    inner = torch.optim.SGD(masters, 0.1)
    state = plain(model=model, optimizer=outer)
    for _ in state.steps(2):
        model(torch.ones(1, 2)).sum().backward()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.grad = parameter.grad
        inner.step()
        outer.step()
        state.commit()
    assert capsys.readouterr().err == ""


def test_a_parameter_group_that_a_restart_could_not_recreate_is_named_once() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
    said: list[str] = []
    added = AddedGroups([model], [optimizer], said.append)
    added.check(0)
    optimizer.add_param_group({"params": list(model[1].parameters())})
    added.check(3)
    assert said == []
    model[0].requires_grad_(True)
    optimizer.add_param_group({"params": list(model[0].parameters())})
    added.check(9)
    added.check(10)
    (text,) = said
    assert text.startswith("SGD has a new parameter group at step 9, so a fault would end the run: ")


# -- gradients that are accumulated over a commit


class Everything(Simulated):
    """A device that holds all tensors, including gradients that come and go."""

    def holds(self, tensor: torch.Tensor) -> bool:
        return True


class Micro:
    """Scripts that accumulate gradients or skip steps."""

    def __init__(self, to_none: bool = True, on_device: bool = False) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.to_none = to_none
        session = alone()
        session._rank.accelerator = Everything([15]) if on_device else None
        self.state = session.protect(model=self.model, optimizer=self.optimizer)

    def loss(self) -> torch.Tensor:
        loss: torch.Tensor = self.model(torch.ones(2, 2)).sum()
        return loss

    def clear(self) -> None:
        self.optimizer.zero_grad(set_to_none=self.to_none)

    def accumulates(self, steps: int = 9) -> None:
        for step in self.state.steps(steps):
            self.loss().backward()
            if step % 4 == 3:
                self.optimizer.step()
                self.clear()
            self.state.commit()

    def skips(self, clears: str, steps: int = 9) -> None:
        """Skip every third step, as a gradient scaler does."""
        for step in self.state.steps(steps):
            if clears == "first":
                self.clear()
            loss = self.loss()
            if clears == "between":
                self.clear()
            loss.backward()
            if step % 3:
                self.optimizer.step()
            if clears == "before commit":
                self.clear()
            self.state.commit()
            if clears == "after commit":
                self.clear()

    def chunks(self) -> None:
        for _ in self.state.steps(4):
            for _ in range(3):
                self.loss().backward()
            self.optimizer.step()
            self.clear()
            self.state.commit()


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("to_none", [False, True])
def test_gradients_that_are_accumulated_across_a_commit_are_warned_of_once(
    to_none: bool, on_device: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    Micro(to_none, on_device).accumulates()
    said = capsys.readouterr().err
    assert said.count("gradients are accumulated across commit() (test_misuse.py, line ") == 1
    assert said.count("\n") == 1


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("to_none", [False, True])
@pytest.mark.parametrize("clears", ["first", "between", "before commit", "after commit"])
def test_a_skipped_step_is_no_accumulation(
    clears: str, to_none: bool, on_device: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    Micro(to_none, on_device).skips(clears)
    assert capsys.readouterr().err == ""


def test_accumulation_within_a_step_causes_no_warning(capsys: pytest.CaptureFixture[str]) -> None:
    Micro().chunks()
    assert capsys.readouterr().err == ""

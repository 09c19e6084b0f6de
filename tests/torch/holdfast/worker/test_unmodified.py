"""Holdfast observes bad gradients and optimizer steps in a script that does not join."""

from __future__ import annotations

import math
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from holdfast.protocol import progress, rank_channel
from holdfast.protocol.launcher_messages import Launch, RankStart
from holdfast.protocol.rank_channel import WorkerMessage, WorkerOrder
from holdfast.worker.launcher_channel import LauncherChannel
from holdfast.worker.unmodified import GradientCheck, UnmodifiedScript
from tests.sandbox import in_child
from tests.torch.holdfast.simulated_device import Simulated, Stuck


def optimizer_with(gradient: float, device: Simulated | None = None) -> torch.optim.Optimizer:
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.full((3,), gradient)
    if device is not None:
        device.put(parameter.grad)
    return torch.optim.SGD([nn.Parameter(torch.ones(2)), parameter], lr=0.1)


@pytest.mark.parametrize(("gradient", "bad"), [(0.5, None), (math.nan, 7), (-math.inf, 7)])
def test_on_the_host_a_bad_gradient_is_found_before_the_next_step(gradient: float, bad: int | None) -> None:
    looks, optimizer = GradientCheck(), optimizer_with(gradient)
    optimizer.step()
    assert looks.bad(optimizer, 7) is None
    assert looks.take_suspect(optimizer) == bad
    assert looks.take_suspect(optimizer) is None


@pytest.mark.parametrize("gradient", [math.nan, math.inf])
def test_a_bad_gradient_that_was_skipped_or_undone_is_no_fault(gradient: float) -> None:
    looks, optimizer = GradientCheck(), optimizer_with(gradient)
    assert looks.bad(optimizer, 7) is None  # the step was skipped
    assert looks.take_suspect(optimizer) is None
    parameter = optimizer.param_groups[0]["params"][1]
    before = parameter.detach().clone()
    optimizer.step()
    assert looks.bad(optimizer, 8) is None
    with torch.no_grad():
        parameter.copy_(before)
    assert looks.take_suspect(optimizer) is None


def test_on_a_device_a_bad_gradient_is_found_one_step_later_without_an_earlier_wait() -> None:
    device = Simulated((0,), rests=True)
    looks = GradientCheck(lambda _: device)
    assert looks.bad(optimizer_with(0.5, device), 6) is None
    assert device.waits == 0
    device.drain()
    assert looks.bad(optimizer_with(math.inf, device), 7) is None
    device.drain()
    spoilt = optimizer_with(0.5, device)
    with torch.no_grad():
        spoilt.param_groups[0]["params"][1].fill_(math.nan)
    assert looks.bad(spoilt, 8) == 7
    assert device.waits == 0
    with pytest.raises(Stuck):  # the host is at most one step ahead
        looks.bad(optimizer_with(0.5, device), 9)


def test_bad_gradients_that_a_scaler_leaves_to_the_optimizer_are_no_fault() -> None:
    optimizer = optimizer_with(math.inf)
    optimizer.found_inf = torch.ones(())  # type: ignore[attr-defined]  # as GradScaler sets it for fused ones
    assert GradientCheck().bad(optimizer, 7) is None


def test_an_optimizer_without_gradients_is_no_fault() -> None:
    assert GradientCheck().bad(torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1), 7) is None


class Watched:
    """The progress page of a rank."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def now(self) -> progress.Progress:
        found = progress.read(self._path.read_bytes())
        assert found is not None
        return found


@pytest.fixture
def seen(tmp_path: Path) -> Iterator[Watched]:
    """Hook torch as in a rank of an unmodified script, and return its page."""
    ours, theirs = socket.socketpair()
    mine = LauncherChannel(ours, tmp_path, 0, 1)
    watch = UnmodifiedScript(mine, Launch(1, 1, 1, "", 0, 0, 0.0), RankStart(0, 0))
    handles = [
        register_optimizer_step_pre_hook(watch._before),
        register_optimizer_step_post_hook(watch._after),
    ]
    yield Watched(mine.page_path)
    for each in handles:
        each.remove()
    theirs.close()
    ours.close()


def made() -> torch.optim.Optimizer:
    return optimizer_with(0.5)


def test_a_late_join_receives_an_earlier_order_to_secure(tmp_path: Path) -> None:
    """Its generation is over, so a step would overwrite the state that the others resume from."""

    kept = []  # outlives `child`, because the listener ends the process when the socket closes

    def child() -> None:
        ours, theirs = rank_channel.pair()
        kept.append(theirs)
        watch = UnmodifiedScript(
            LauncherChannel(ours, tmp_path, 0, 1), Launch(1, 1, 1, "", 0, 0, 0.0), RankStart(0, 0)
        )
        threading.Thread(target=watch._listen, daemon=True).start()
        theirs.settimeout(20.0)
        rank_channel.send(theirs, WorkerOrder("secure", generation=1))
        while rank_channel.receive(theirs, WorkerMessage)[0].secured is None:
            continue
        heard: list[WorkerOrder] = []
        watch.hand_over(heard.append)
        assert heard == [WorkerOrder("secure", generation=1)]

    assert in_child(child) == 0


def test_each_new_optimizer_counts_its_steps_once_the_previous_one_is_done(
    seen: Watched,
) -> None:
    """In folds, two-phase fine-tuning or a sweep, the first optimizer may exist but never step again."""
    kept = []
    for fold in range(3):
        optimizer = made()
        kept.append(optimizer)
        for _ in range(10):
            optimizer.step()
        assert seen.now().step >= 10 + 9 * fold, "at most the first step may be missing"
        assert seen.now().phase is progress.Phase.DATA


def test_a_deleted_optimizer_no_longer_counts(seen: Watched) -> None:
    for _ in range(5):
        made().step()
    assert seen.now().step == 5


@pytest.mark.parametrize("critics", [1, 5])
def test_only_one_of_several_alternating_optimizers_counts(seen: Watched, critics: int) -> None:
    generator, critic = made(), made()
    for _ in range(10):
        for _ in range(critics):
            critic.step()
        generator.step()
    assert seen.now().step == 10 * critics


def test_a_step_of_an_optimizer_that_does_not_count_shows_activity(seen: Watched) -> None:
    first, other = made(), made()
    first.step()
    before = seen.now()
    other.step()
    assert seen.now().step == before.step
    assert seen.now().phase_seq > before.phase_seq
    other.step()
    assert seen.now().step == before.step + 1


def test_with_one_optimizer_per_parameter_a_step_of_all_counts_once(seen: Watched) -> None:
    each_own = [made() for _ in range(50)]
    for _ in range(4):
        for each in each_own:
            each.step()
    assert seen.now().step == 4

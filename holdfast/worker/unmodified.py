"""Run a script that never calls `join`: hold it before its first line, and count its steps with hooks."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from holdfast.protocol import codec, rank_channel
from holdfast.protocol.environment import rank_environment
from holdfast.protocol.launcher_messages import NAN, BadNumber, Launch, RankStart, SecureAnswer, StartTimes
from holdfast.protocol.progress import FLAG_NONFINITE, Phase
from holdfast.protocol.progress_writer import Page
from holdfast.protocol.rank_channel import WorkerMessage, WorkerOrder
from holdfast.state import device, gradients
from holdfast.state.device import Device, PendingNumbers
from holdfast.worker.drills import RankDrill, poison_gradients
from holdfast.worker.launcher_channel import FLAG_WAIT_S, LauncherChannel

if TYPE_CHECKING:
    import torch


def wait_for_start(mine: LauncherChannel) -> None:
    """Wait for the order to start, set the rank's environment, and hook the script's optimizers."""
    mine.say(WorkerMessage("parked", os.getpid()))
    order = mine.wait_start()
    assert order.launch is not None
    assert order.rank is not None
    os.environ.update(rank_environment(order.launch, order.rank))
    watch = UnmodifiedScript(mine, order.launch, order.rank)
    mine.on_join = watch.hand_over
    watch.begin()
    # Restore the interpreter's handler last, because until now no code could handle a KeyboardInterrupt.
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


class UnmodifiedScript:
    """Counts optimizer steps as training steps, and checks one gradient of each step."""

    def __init__(self, mine: LauncherChannel, launch: Launch, rank: RankStart) -> None:
        self._mine = mine
        self._rank = rank.rank
        self._page = Page.create(mine.page_path)
        self._page.begin(launch.generation, rank.rank, rank.local_rank, os.getpid(), 0)
        self._now = time.monotonic_ns
        self._marks = StartTimes(started_ns=self._now())
        self._step = 0
        self._turns = StepCounter()
        self._drill = RankDrill()
        self._looks = GradientCheck()
        self._joined: Callable[[WorkerOrder], None] | None = None
        self._secured: WorkerOrder | None = None  # the order that ended the generation
        mine.say(WorkerMessage("started", marks=self._marks))

    def begin(self) -> None:
        """Hook torch's optimizers, and start receiving orders."""
        threading.Thread(target=self._listen, name="holdfast", daemon=True).start()
        if "torch" not in sys.modules:
            return  # torch has not been preloaded, so the script's steps cannot be observed
        from torch.optim import optimizer

        optimizer.register_optimizer_step_pre_hook(self._before)
        optimizer.register_optimizer_step_post_hook(self._after)

    def hand_over(self, obey: Callable[[WorkerOrder], None]) -> None:
        """Pass all later orders to `obey`, because the script joins although its import went undetected."""
        self._joined = obey
        if self._secured is not None:  # the generation has ended, so the script must take no more steps
            obey(self._secured)

    def _before(self, optimizer: Any, *_: Any) -> None:
        if self._joined is not None or not self._mine.is_ours:
            return
        if not self._turns.begins(optimizer):
            self._page.phase(Phase.OPTIMIZER)  # does not count as a step, but shows that the script works
            return
        self._drill.hang()
        bad = self._looks.take_suspect(optimizer)
        if bad is not None:
            self._flag(bad)
        if self._drill.take_nan():
            poison_gradients(optimizer)
        self._page.phase(Phase.OPTIMIZER)

    def _after(self, optimizer: Any, *_: Any) -> None:
        if self._joined is not None or not self._mine.is_ours:
            return
        if not self._turns.counts(optimizer):
            self._page.phase(Phase.DATA)
            return
        bad = self._looks.bad(optimizer, self._step)
        if bad is not None:
            self._flag(bad)
        self._page.commit(self._step + 1, math.nan, math.nan, 0, 0, 0.0, 0, -1)
        self._step += 1
        if self._step == 1:
            stamps = StartTimes(self._marks.started_ns, self._now(), self._now(), self._now())
            self._mine.say(WorkerMessage("settled", marks=stamps))

    def _flag(self, bad: int) -> None:
        """Report that step `bad` spoilt the parameters. Wait for a restart from the script's checkpoint."""
        self._page.commit(self._step, math.nan, math.nan, 0, 0, 0.0, FLAG_NONFINITE, -1)
        self._mine.say(WorkerMessage("flag", flag=BadNumber(NAN, bad, repr(math.nan), -1, self._now())))
        threading.Event().wait(FLAG_WAIT_S)

    def _listen(self) -> None:
        while True:
            try:
                order, _ = rank_channel.receive(self._mine.control, WorkerOrder)
            except codec.InvalidMessage:
                continue
            except (rank_channel.Closed, OSError):
                os._exit(1)
            if order.do == "secure":
                self._secured = order
            if self._joined is not None:
                self._joined(order)
            elif order.do == "secure":  # answer immediately, or the launcher would wait for a copy
                nothing = SecureAnswer(self._rank, -1, False, "the script protects nothing")
                self._mine.say(WorkerMessage("secured", secured=nothing))
            elif order.do == "drill":
                self._drill.obey(order.drill)


class StepCounter:
    """Chooses the one optimizer whose steps count as training steps, so that each step counts once.

    It starts with the script's first optimizer. Another optimizer takes over when the counted one no longer
    exists, or when the other steps twice while the counted one does not step. So the count continues with
    the new optimizers of cross-validation folds, training phases and sweeps. A GAN's optimizers alternate, so
    only one of them counts.
    """

    def __init__(self) -> None:
        self._counting: weakref.ref[Any] | None = None
        # The other optimizers that have stepped since the last step of the counted one.
        self._since: weakref.WeakSet[Any] = weakref.WeakSet()

    def begins(self, optimizer: Any) -> bool:
        """Record that `optimizer` begins a step; return True if that step counts."""
        counting = self._counting() if self._counting is not None else None
        if counting is not optimizer:
            if counting is not None and optimizer not in self._since:
                self._since.add(optimizer)
                return False
            self._counting = weakref.ref(optimizer)
        self._since.clear()
        return True

    def counts(self, optimizer: Any) -> bool:
        return self._counting is not None and self._counting() is optimizer


class GradientCheck:
    """Checks one gradient of each step, because a NaN that the ranks share appears in all gradients.

    A bad gradient is a fault only if the parameters are still bad when the next step is about to be written,
    because an optimizer may skip a bad step and a script may undo it. On a GPU, the host does not wait for
    the result, but reads it after the next step.
    """

    def __init__(self, device_of: Callable[[torch.Tensor], Device] | None = None) -> None:
        self._device_of = device_of or _device_of
        self._device: Device | None = None
        self._coming: tuple[int, PendingNumbers] | None = None
        self._suspect: int | None = None  # the step that may have spoilt the parameters

    def take_suspect(self, optimizer: Any) -> int | None:
        """Return the suspect step if it has spoilt the parameters, otherwise None. Forget it either way."""
        suspect, self._suspect = self._suspect, None
        return suspect if suspect is not None and gradients.state_is_spoilt((), (optimizer,)) else None

    def bad(self, optimizer: Any, step: int) -> int | None:
        """Check the gradient of the completed `step`. Return the previous step if it has spoilt the state."""
        found = self._arrived()
        if found is not None and not gradients.state_is_spoilt((), (optimizer,)):
            found = None
        grad = _gradient(optimizer)
        # If `found_inf` exists, a gradient scaler has checked the gradients, and the optimizer skips bad
        # steps.
        if grad is None or getattr(optimizer, "found_inf", None) is not None:
            return found
        self._device = self._device or self._device_of(grad)
        if not self._device.queues or grad.is_sparse:
            self._suspect = None if _finite(grad) else step
            return found
        self._coming = step, self._device.bring([_sum(grad)])
        return found

    def _arrived(self) -> int | None:
        coming, self._coming = self._coming, None
        if coming is None or self._device is None:
            return None
        step, brought = coming
        self._device.wait(brought.mark)
        return None if math.isfinite(brought.values()[0]) else step


def _device_of(grad: torch.Tensor) -> Device:
    return device.CudaDevice(grad.device) if grad.is_cuda else device.HostDevice()


def _gradient(optimizer: Any) -> torch.Tensor | None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                return cast("torch.Tensor", parameter.grad)
    return None


def _finite(grad: torch.Tensor) -> bool:
    import torch

    return bool(torch.isfinite(grad).all())


def _sum(grad: torch.Tensor) -> torch.Tensor:
    import torch

    with torch.no_grad():
        return grad.detach().sum(dtype=torch.float64)

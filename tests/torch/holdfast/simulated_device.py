"""A device whose kernels run late and independently of its copies, under the control of a test.

Its tensors are on the host, but may be read only through the device: a kernel's result does not exist
before the kernel has run. At each request, the device advances as far as the next choice allows, so
a list of numbers is one interleaving of the host, the training's queue and the copies' queue.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from holdfast.state.device import Broken, DeviceCopy, Pair, PendingNumbers, PinnedMemory, QueueMark

PATIENCE = 400  # polls of a mark: in these tests, only a hang takes longer
FAIR = 8  # polls after which a resting device must advance


class Stuck(Exception):
    """Raised if the host waits for something that never happens."""


@dataclass(eq=False)
class Here:
    """A mark in a queue of the device."""

    reached: bool = False


@dataclass(eq=False)
class Simulated:
    """See `holdfast.state.device.Device`. `choices` is repeated endlessly."""

    choices: Sequence[int] = (0,)
    queues: bool = True
    meanwhile: Callable[[int], None] = lambda _: None  # called at each turn with the choice
    broken: bool = False
    rests: bool = False  # True: the device may rest for longer than `FAIR` polls
    kernels: int = 0  # the number of kernels that have run
    waits: int = 0  # the host's waits for the training's queue that did not end immediately
    pinned: list[int] = field(default_factory=list)
    _training: deque[Any] = field(default_factory=deque)
    _copies: deque[Any] = field(default_factory=deque)
    _memory: dict[int, torch.Tensor] = field(default_factory=dict)
    _turns: int = 0

    # -- the test's side

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """Place a tensor on the device."""
        self._memory[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def launch(self, *kernels: Callable[[], object]) -> None:
        """Queue kernels, as a script does."""
        self._training.extend(kernels)
        self.turn()

    def hang(self) -> None:
        """Queue a collective that never ends: its peer is dead."""
        self._training.append(None)

    def turn(self) -> None:
        """Advance both queues as far as the next choice allows."""
        choice = self.choices[self._turns % len(self.choices)]
        self._turns += 1
        fair = self._turns % FAIR == 0 and not self.rests
        for _ in range(choice & 3 or fair):
            self.train()
        for _ in range(choice >> 2 & 3 or fair):
            self._run(self._copies)
        self.meanwhile(choice)

    def train(self) -> bool:
        """Run one kernel of the training's queue; return False if it is empty or blocked."""
        return self._run(self._training)

    def drain(self) -> None:
        """Run all kernels and copies that can run."""
        while self.train() or self._run(self._copies):
            pass

    # -- the interface

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._memory

    def mark(self) -> Here:
        self._check()
        mark = Here()
        self._training.append(mark)
        self.turn()
        return mark

    def reached(self, mark: QueueMark) -> bool:
        self._check()
        assert isinstance(mark, Here)
        self.turn()
        return mark.reached

    def wait(self, mark: QueueMark, limit_s: float | None = None) -> bool:
        assert isinstance(mark, Here)
        self.waits += not mark.reached
        for _ in range(PATIENCE):
            if self.reached(mark):
                return True
        if limit_s is None:
            raise Stuck
        return mark.reached

    def copy(self, pairs: Sequence[Pair]) -> DeviceCopy:
        self._check()
        for target, source in pairs:
            assert self.holds(source), "host memory was copied as if it were device memory"
            assert source.is_contiguous()
            assert target.is_contiguous()
            for half in (0, 1):  # in pieces, so that a write in between shows
                self._copies.append(_piece(target.view(-1), source.view(-1), half))
        done = Copying([Here()])
        self._copies.append(done.marks[-1])
        self.turn()
        return done

    def hold_back(self, copy: DeviceCopy) -> None:
        self._training.append(copy)
        self.turn()

    def bring(self, numbers: Sequence[torch.Tensor]) -> PendingNumbers:
        self._check()
        brought = Numbers(Here(), [torch.full((), -1.0, dtype=torch.float64) for _ in numbers])
        for target, number in zip(brought.targets, numbers, strict=True):
            self._training.append(_bringing(target, number.detach()))
        self._training.append(brought.mark)
        self.turn()
        return brought

    def pin(self, memory: memoryview) -> PinnedMemory | None:
        self.pinned.append(len(memory))
        return Lock(self, len(memory))

    # -- inside

    def _check(self) -> None:
        if self.broken:
            raise Broken("an illegal memory access was encountered")

    def _run(self, queue: deque[Any]) -> bool:
        if not queue or queue[0] is None or self.broken:
            return False
        if isinstance(queue[0], Copying):
            if not queue[0].marks[-1].reached:
                return False
            queue.popleft()
            return True
        found = queue.popleft()
        if isinstance(found, Here):
            found.reached = True
        else:
            self.kernels += 1
            with torch.no_grad():
                found()
        return True


@dataclass(eq=False)
class Copying:
    marks: list[Here]

    def seconds(self) -> float:
        assert self.marks[-1].reached
        return 1e-4


@dataclass(eq=False)
class Numbers:
    mark: Here
    targets: list[torch.Tensor]

    def values(self) -> list[float]:
        assert self.mark.reached
        return [float(each) for each in self.targets]


@dataclass(eq=False)
class Lock:
    device: Simulated
    size: int

    def release(self) -> None:
        self.device.pinned.remove(self.size)


def _piece(target: torch.Tensor, source: torch.Tensor, half: int) -> Callable[[], object]:
    middle = source.numel() // 2
    part = slice(middle) if half == 0 else slice(middle, None)
    return lambda: target[part].copy_(source[part])


def _bringing(target: torch.Tensor, number: torch.Tensor) -> Callable[[], object]:
    return lambda: target.copy_(number.reshape(()))


class Late(torch.optim.Optimizer):
    """Momentum whose kernels are queued on the device. Its step count is on the host."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter], device: Simulated, lr: float = 0.5) -> None:
        super().__init__(list(parameters), {"lr": lr})
        self.device = device

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.zeros(())
                    state["momentum"] = self.device.put(torch.zeros_like(parameter))
                state["step"] += 1
                self._launch(parameter, state["momentum"], group["lr"])

    def _launch(self, parameter: torch.Tensor, momentum: torch.Tensor, lr: float) -> None:
        """Write in place and in pieces: a copy made during the writes sees some of each.

        Versions are counted when a kernel is launched, not when it runs.
        """
        grad = parameter.grad
        assert grad is not None
        middle = len(parameter) // 2
        torch.autograd.graph.increment_version(parameter)
        for rows in (slice(middle), slice(middle, None)):
            p, m, g = (each.data[rows] for each in (parameter, momentum, grad))
            self.device.launch(lambda m=m, g=g: m.mul_(0.5).add_(g))  # type: ignore[misc]
            self.device.launch(lambda p=p, m=m: p.sub_(m * lr))  # type: ignore[misc]

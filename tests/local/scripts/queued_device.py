"""Train on a device that is two threads: python queued_device.py STEPS DIGEST [STEP MARKER].

The host queues a step's kernels and continues. The kernels run late, and the collective among them blocks
forever after a peer has died, as NCCL's collectives do. Another thread copies to the host. Rank 1 spoils STEP
once.
"""

from __future__ import annotations

import functools
import math
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tiny_model import Sampler, once, write_digest
from torch import Tensor, nn

import holdfast

FORWARD_S, BACKWARD_S, WRITE_S = 0.002, 0.006, 0.002


class Line(threading.Thread):
    """Runs the queued kernels one after another."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.kernels: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self.start()

    def run(self) -> None:
        while True:
            kernel = self.kernels.get()
            try:
                with torch.no_grad():
                    kernel()
            except RuntimeError:  # a collective whose peer is dead
                threading.Event().wait()


class Device:
    """See `holdfast.state.device.Device`."""

    queues = True

    def __init__(self) -> None:
        self.training, self.copies = Line(), Line()
        self._memory: dict[int, Tensor] = {}

    def put(self, tensor: Tensor) -> Tensor:
        self._memory[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def launch(self, kernel: Callable[..., object], *given: Any) -> None:
        self.training.kernels.put(functools.partial(kernel, *given))

    def holds(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._memory

    def mark(self) -> threading.Event:
        mark = threading.Event()
        self.launch(mark.set)
        return mark

    def reached(self, mark: threading.Event) -> bool:
        return mark.is_set()

    def wait(self, mark: threading.Event, limit_s: float | None = None) -> bool:
        return mark.wait(limit_s)

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Copy:
        copy = Copy()
        for target, source in pairs:
            self.copies.kernels.put(functools.partial(target.copy_, source))
        self.copies.kernels.put(copy.marks[0].set)
        return copy

    def hold_back(self, copy: Copy) -> None:
        self.launch(copy.marks[0].wait)

    def bring(self, numbers: Sequence[Tensor]) -> Brought:
        found = [torch.full_like(each, -1.0, device="cpu") for each in numbers]
        for target, number in zip(found, numbers, strict=True):
            self.launch(target.copy_, number)
        return Brought(self.mark(), found)

    def pin(self, memory: memoryview) -> None:
        return None


class Copy:
    def __init__(self) -> None:
        self.marks = [threading.Event()]

    def seconds(self) -> float:
        return 1e-3


class Brought:
    def __init__(self, mark: threading.Event, found: list[Tensor]) -> None:
        self.mark, self._found = mark, found

    def values(self) -> list[float]:
        return [float(each) for each in self._found]


class Momentum(torch.optim.Optimizer):
    """Its step count is on the host, everything else on the device."""

    def __init__(self, parameters: Iterable[nn.Parameter], device: Device) -> None:
        super().__init__(list(parameters), {"lr": 0.01})
        self.device = device
        for parameter in self.param_groups[0]["params"]:  # created now: a restart fills them in place
            momentum = device.put(torch.zeros_like(parameter))
            self.state[parameter] = {"step": torch.zeros(()), "momentum": momentum}

    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["step"] += 1
                for written in (parameter, state["momentum"]):  # the host counts what it queues
                    torch.autograd.graph.increment_version(written)
                self.device.launch(_written, parameter, state["momentum"], parameter.grad, group["lr"])


def _written(parameter: Tensor, momentum: Tensor, grad: Tensor, lr: float) -> None:
    momentum.data.mul_(0.9).add_(grad)
    time.sleep(WRITE_S)  # half of the update is written
    parameter.data.sub_(momentum * lr)


def _backward(parameters: list[Tensor], batch: Tensor, loss: Tensor, spoils: bool) -> None:
    time.sleep(BACKWARD_S)
    if spoils:
        batch.fill_(math.nan)
    for parameter in parameters:
        assert parameter.grad is not None
        parameter.grad.copy_(parameter * 0.1 + batch.mean())
        dist.all_reduce(parameter.grad)
    loss.copy_(sum(parameter.pow(2).sum() for parameter in parameters) + batch.pow(2).mean())


def train(steps: int, digest: Path, spoilt: int, marker: Path) -> None:
    session = holdfast.join()
    device = Device()
    session._rank.accelerator = device
    torch.manual_seed(0)
    model = nn.Linear(32, 32)
    for parameter in model.parameters():
        device.put(parameter)
        parameter.grad = torch.zeros_like(parameter)
    optimizer = Momentum(model.parameters(), device)
    sampler = Sampler(session.rank)
    state = session.protect(model=model, optimizer=optimizer, sampler=sampler)
    for step in state.steps(steps):
        batch, loss = sampler.batch(), device.put(torch.full((), -1.0))
        model(batch[:1])  # only to call its hooks; the device's computation is below
        device.launch(time.sleep, FORWARD_S)
        spoils = (step, session.rank) == (spoilt, 1) and once(marker)
        device.launch(_backward, list(model.parameters()), batch, loss, spoils)
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / (1 + step % 7)
        state.commit(loss=loss, samples=16, position=16 * step)
    device.mark().wait()
    write_digest(digest.with_name(f"{digest.name}.{session.rank}"), model, optimizer)


_, steps, digest, spoilt, marker = (*sys.argv, "-1", "")[:5]
train(int(steps), Path(digest), int(spoilt), Path(marker))

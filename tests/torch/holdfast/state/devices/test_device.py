"""Calls to CUDA, with a replacement that records them. tests/gpu uses the real CUDA."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.state import device as accelerator
from holdfast.state.device import Broken, CudaDevice, HostDevice

GPU = torch.device("cuda", 0)


class Runtime:
    """The functions of torch.cuda, and a record of their calls in order."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.stream_now = "training"
        self.registered: set[int] = set()
        self.error = ""  # the error that the next call raises

    def event(self, enable_timing: bool = False, blocking: bool = False) -> Event:
        assert blocking, "a waiting thread must not spin"
        return Event(self, enable_timing)

    @contextmanager
    def stream(self, stream: str) -> Iterator[None]:
        before, self.stream_now = self.stream_now, stream
        yield
        self.stream_now = before

    def cudart(self) -> Runtime:
        return self

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        if address in self.registered:
            return 712  # cudaErrorHostMemoryAlreadyRegistered
        self.registered.add(address)
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        self.registered.remove(address)
        return 0

    def check(self) -> None:
        if self.error:
            raise RuntimeError(self.error)


class Event:
    def __init__(self, runtime: Runtime, timed: bool) -> None:
        self.runtime, self.timed = runtime, timed
        self.reached, self.number = False, -1

    def record(self, stream: str) -> None:
        self.runtime.check()
        self.number = len(self.runtime.done)
        self.runtime.done.append(f"mark on {stream}")

    def query(self) -> bool:
        self.runtime.check()
        return self.reached

    def synchronize(self) -> None:
        self.runtime.done.append("host waits")

    def elapsed_time(self, other: Event) -> float:
        assert self.timed
        assert other.timed
        return 1500.0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    made, zeros = Runtime(), torch.zeros

    def without_gpu(*size: Any, pin_memory: bool = False, device: Any = None, **more: Any) -> torch.Tensor:
        if device is not None:
            made.done.append("error taken off")
        return zeros(*size, **more)

    monkeypatch.setattr(torch, "zeros", without_gpu)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _device, priority: "copies")
    monkeypatch.setattr(torch.cuda, "Event", made.event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device=None: Current(made))
    monkeypatch.setattr(torch.cuda, "stream", made.stream)
    monkeypatch.setattr(torch.cuda, "cudart", made.cudart)
    return made


class Current(str):
    """The calling thread's stream."""

    __slots__ = ("runtime",)
    runtime: Runtime

    def __new__(cls, runtime: Runtime) -> Current:
        found = super().__new__(cls, runtime.stream_now)
        found.runtime = runtime
        return found

    def wait_event(self, event: Event) -> None:
        self.runtime.done.append(f"{self} waits for {event.number}")


def test_a_mark_is_recorded_in_the_scripts_stream_and_queried_without_waiting(runtime: Runtime) -> None:
    device = CudaDevice(GPU)
    mark: Any = device.mark()
    assert not device.reached(mark)
    assert not device.wait(mark, 0.001)
    assert runtime.done == ["mark on training"]
    mark.reached = True
    assert device.reached(mark)
    assert device.wait(mark, 0.001)
    assert device.wait(mark)
    assert runtime.done == ["mark on training", "host waits"]


def test_a_copy_runs_in_its_own_stream_without_waiting_and_later_writes_wait_for_it(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accelerator, "PIECE_BYTES", 8)
    device = CudaDevice(GPU)
    pairs = [(torch.zeros(2), torch.full((2,), float(n))) for n in range(3)]
    copy = device.copy(pairs)
    assert [target.tolist() for target, _ in pairs] == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]
    assert runtime.done == ["mark on copies"] * 5, (
        "marks are set at the beginning, after each piece, and at the end"
    )
    assert len(copy.marks) == 4
    assert copy.seconds() == 1.5
    device.hold_back(copy)
    assert runtime.done[-1] == "training waits for 4"


def test_numbers_of_any_type_and_shape_are_transferred(runtime: Runtime) -> None:
    device = CudaDevice(GPU)
    for _ in range(accelerator.BATCHES + 1):
        numbers = [torch.tensor([[2.5]], dtype=torch.bfloat16), torch.tensor(3.0), torch.tensor(7.0).double()]
        brought = device.bring(numbers)
        assert runtime.done[-1] == "mark on training"
        assert brought.values() == [2.5, 3.0, 7.0]


def test_memory_is_pinned_once_and_a_refusal_by_the_driver_leaves_no_error(runtime: Runtime) -> None:
    device = CudaDevice(GPU)
    memory = memoryview(bytearray(64))
    pinned = device.pin(memory)
    assert pinned is not None
    assert runtime.done == []
    assert device.pin(memory) is None
    assert runtime.done == ["error taken off"]
    pinned.release()
    pinned.release()
    assert runtime.registered == set()


def test_a_cuda_error_becomes_one_line_about_a_broken_device(runtime: Runtime) -> None:
    device = CudaDevice(GPU)
    mark = device.mark()
    runtime.error = "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be ..."
    for ask in (device.mark, lambda: device.reached(mark), lambda: device.copy([])):
        with pytest.raises(Broken, match=r"^CUDA error: an illegal memory access was encountered$"):
            ask()


def test_the_device_is_that_of_the_parameters() -> None:
    assert isinstance(accelerator.device_of([nn.Linear(2, 2)]), HostDevice)
    assert isinstance(accelerator.device_of([]), HostDevice)

"""States on a real GPU: when the state of a step is complete, and what a commit or a copy waits for."""

from __future__ import annotations

import socket
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bench.gpu.training import GPU, Training, cycles, folder, reference
from holdfast.state.device import CudaDevice

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU"),
]

STILL_S = 3.0  # simulates a collective that never ends; the tested calls take about a hundredth of it


@pytest.fixture
def memory() -> Iterator[Path]:
    with folder() as path:
        yield path


@contextmanager
def waiting_raises() -> Iterator[None]:
    """Let calls raise that make the host wait for the device, apart from waits for a single event."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch calls this mode a prototype
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def wrapped(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, device_ids=[0])


def test_the_last_committed_state_is_complete_until_the_optimizers_kernels_run(memory: Path) -> None:
    expected = reference(3)
    training = Training(memory)
    training.run(3)
    training.queue(3, before_write=cycles(STILL_S))  # committed by the host, not begun by the device
    began = time.monotonic()
    answer = training.secured()
    assert (answer.step, answer.whole) == (3, True), answer
    assert time.monotonic() - began < STILL_S / 2, "the copy waited for the training's stream"
    assert training.held()[3] == expected[3]


def test_a_copy_that_the_optimizer_overtakes_is_discarded(memory: Path) -> None:
    # 0.4 GB with the optimizer's state, into memory that is not pinned yet: a copy of some 50 ms.
    expected = reference(4, width=4096)
    training = Training(memory, width=4096)
    training.run(3)
    training.queue(3, before_write=cycles(0.02))
    answer = training.secured()
    assert answer.whole, answer
    assert training.held()[answer.step] == expected[answer.step]


def test_a_commit_does_not_wait_for_its_own_step_but_for_the_step_before(memory: Path) -> None:
    training = Training(memory)
    training.run(3)
    torch.cuda.synchronize()
    long = cycles(0.5)
    with waiting_raises():
        began = time.monotonic()
        training.queue(3, before_commit=long)
        first_s = time.monotonic() - began
        training.queue(next(training.loop))
        second_s = time.monotonic() - began
    assert first_s < 0.25
    assert second_s > 0.4


def test_snapshots_taken_during_training_are_exact(memory: Path) -> None:
    expected = reference(12)
    training = Training(memory, every=2)
    for _ in training.steps(12):
        for step, bits in training.held().items():
            assert bits == expected[step], f"step {step}"
    assert training.held()[12] == expected[12]


def test_a_slot_is_pinned_once_and_a_refused_pin_leaves_no_error() -> None:
    device = CudaDevice(GPU)
    memory = memoryview(bytearray(1 << 20))
    pinned = device.pin(memory)
    assert pinned is not None
    assert device.pin(memory) is None, "the memory was pinned twice"
    assert float(torch.ones(4, device=GPU).sum()) == 4.0
    pinned.release()
    again = device.pin(memory)
    assert again is not None
    again.release()


def test_with_nccl_a_survivor_secures_the_state_before_the_collective(memory: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    store = dist.TCPStore("127.0.0.1", port, 1, is_master=True)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    try:
        expected = reference(3, wrap=wrapped)
        training = Training(memory, wrap=wrapped)
        training.run(3)
        training.queue(3, before_write=cycles(STILL_S))
        answer = training.secured()
        assert (answer.step, answer.whole) == (3, True), answer
        assert training.held()[3] == expected[3]
    finally:
        dist.destroy_process_group()

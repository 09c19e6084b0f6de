"""A process sees its member's GPUs, and waits for the previous user of a device before it takes it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.process import gpu_assignment

SLEEPER = (sys.executable, "-c", "import signal; signal.pause()")


@pytest.fixture(autouse=True)
def visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(gpu_assignment.VISIBLE, "0,1,2,3")


@pytest.fixture
def predecessor(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Yield another process that has registered for device 3."""
    with subprocess.Popen(SLEEPER) as process:
        (tmp_path / "device-3").write_bytes(gpu_assignment._sign(process.pid))
        yield process
        process.kill()


def test_a_process_that_takes_a_device_sees_those_of_its_member_and_registers_its_own(tmp_path: Path) -> None:
    assert gpu_assignment.await_turn("2,3", 1, tmp_path)
    assert os.environ[gpu_assignment.VISIBLE] == "2,3"
    assert (tmp_path / "device-3").read_bytes() == gpu_assignment._sign(os.getpid())
    assert not (tmp_path / "device-2").exists(), "the device of another rank must not be taken"
    assert gpu_assignment.await_turn("2,3", 1, tmp_path), "a second call must also succeed"


def test_a_device_is_taken_once_the_process_that_had_it_has_ended(
    tmp_path: Path, predecessor: subprocess.Popen[bytes]
) -> None:
    found: list[bool] = []
    successor = threading.Thread(target=lambda: found.append(gpu_assignment.await_turn("2,3", 1, tmp_path)))
    successor.start()
    successor.join(0.05)
    assert successor.is_alive(), "two ranks use one GPU"
    predecessor.kill()
    successor.join(20)
    assert found == [True]
    assert (tmp_path / "device-3").read_bytes() == gpu_assignment._sign(os.getpid())


def test_a_process_that_never_ends_is_waited_for_no_longer_than_the_limit(
    tmp_path: Path, predecessor: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_assignment, "TURN_S", 0.01)
    assert not gpu_assignment.await_turn("3", 0, tmp_path)
    assert gpu_assignment.await_turn("2", 0, tmp_path), "another device must be free"


def test_another_process_with_the_pid_of_the_registered_one_is_not_waited_for(
    tmp_path: Path, predecessor: subprocess.Popen[bytes]
) -> None:
    (tmp_path / "device-3").write_bytes(b"%d 17" % predecessor.pid)
    assert gpu_assignment.await_turn("3", 0, tmp_path)
    (tmp_path / "device-3").write_bytes(b"\xff nonsense")
    assert gpu_assignment.await_turn("3", 0, tmp_path)


NVML = ("/dev/nvidiactl", "/dev/nvidia0", "pipe:[1]")
UVM = (*NVML, "/dev/nvidia-uvm")  # on an H200 with driver 580, NVML opens this file too
UNUSED, USED = 3, 0  # what CUDA's driver answers before it is initialized in a process, and after that


@pytest.mark.parametrize(
    ("open_files", "driver", "parent", "used"),
    [
        (NVML, UNUSED, False, False),
        (UVM, UNUSED, False, False),
        (UVM, USED, False, True),
        (
            UVM,
            UNUSED,
            True,
            True,
        ),  # after a fork, the driver answers as if it were unused, but it is unusable
    ],
)
def test_a_process_that_has_called_cuda_is_recognized(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    open_files: tuple[str, ...],
    driver: int,
    parent: bool,
    used: bool,
) -> None:
    for number, target in enumerate(open_files):
        (tmp_path / str(number)).symlink_to(target)
    monkeypatch.setattr(gpu_assignment, "_parent_used_cuda", parent)
    assert gpu_assignment.uses_cuda(tmp_path, lambda: driver) is used


def test_the_driver_is_not_loaded_to_ask_it() -> None:
    assert gpu_assignment._driver_code() == UNUSED
    assert "libcuda" not in Path("/proc/self/maps").read_text()

"""Divide a machine's GPUs among the members of a group. Each rank receives its GPUs when it starts.

A process sees only the GPUs that its environment lists when it first calls CUDA, so a warm process makes no
CUDA call while it waits. It receives its GPUs along with its rank, no matter which member had the rank
before, and uses them only after the previous process has exited and freed their memory.
"""

from __future__ import annotations

import fcntl
import os
import select
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from holdfast.protocol import environment

VISIBLE = "CUDA_VISIBLE_DEVICES"
# Torch's first check for GPUs calls CUDA unless this variable makes it query NVML.
WITHOUT_CUDA = ("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
TURN_PREFIX = "device-"  # the prefix of the files that processes use to record which device they use
TURN_S = 30.0  # how long to wait for a killed process, whose resources the driver must free first
_OPEN_BY_CUDA = "nvidia-uvm"  # a device file that CUDA opens; with some drivers, NVML opens it too
_NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED of cuda.h

_parent_used_cuda = False


def visible_devices(given: Mapping[str, str], rank: int, local_rank: int, nproc: int) -> str:
    """Return CUDA_VISIBLE_DEVICES for the member of `rank`; "" if there are no GPUs to share, or too few.

    `given` is the launcher's environment. The member with ranks 0 to `nproc` - 1 receives the first GPUs, the
    next member the GPUs after those, and so on. As with torchrun, each rank sees all GPUs of its member and
    uses the one whose index is its local rank.
    """
    words = given.get(environment.DEVICES, "").split(",")
    first = rank - local_rank
    chosen = words[first : first + nproc]
    return ",".join(chosen) if len(chosen) == nproc and all(chosen) else ""


def uses_cuda(descriptors: Path = Path("/proc/self/fd"), driver: Callable[[], int] | None = None) -> bool:
    """Return True if this process has called CUDA, which fixes the GPUs that it sees.

    A forked process cannot use CUDA if its parent did. It is then treated as having used CUDA.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return True
    if not any(_target(each).endswith(_OPEN_BY_CUDA) for each in descriptors.iterdir()):
        return False
    return _parent_used_cuda or (driver or _driver_code)() != _NOT_INITIALIZED


def before_forks() -> None:
    """Record, for the processes that this one will fork, whether it has called CUDA."""
    global _parent_used_cuda
    _parent_used_cuda = uses_cuda()


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:
        return ""


def _driver_code() -> int:
    """Return what CUDA's driver library answers in this process; any call fails before it is initialized."""
    import ctypes

    try:
        library = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return _NOT_INITIALIZED  # it is not even loaded
    return int(library.cuDeviceGetCount(ctypes.byref(ctypes.c_int())))


def await_turn(visible: str, local_rank: int, turns: Path) -> bool:
    """Make the devices `visible` to this process, and wait until the previous user of its device has ended.

    `turns` is a folder that all ranks of the machine share. Returns False if the previous user does not end
    within `TURN_S`. If the driver never releases that process, CUDA will report the problem.
    """
    os.environ[VISIBLE] = visible
    name = visible.split(",")[local_rank].strip().replace("/", "_")
    with open(turns / f"{TURN_PREFIX}{name}", "a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # only another successor of the same process can hold the lock
        file.seek(0)
        ended = _ended(file.read(64), TURN_S)
        file.truncate(0)
        file.write(_sign(os.getpid()))
    return ended


def _sign(pid: int) -> bytes:
    """Return the identity of a process on this machine: its pid and its start time."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return b""
    return b"%d %s" % (pid, text[text.rindex(b")") + 2 :].split()[19])


def _ended(sign: bytes, limit_s: float) -> bool:
    """Wait until the process with this identity has exited and released its memory and devices."""
    pid = sign.partition(b" ")[0]
    if not pid.isdigit() or int(pid) == os.getpid():
        return True
    try:
        descriptor = os.pidfd_open(int(pid))
    except OSError:
        return True
    try:
        if _sign(int(pid)) != sign:
            return True
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        return bool(poller.poll(limit_s * 1e3))
    finally:
        os.close(descriptor)

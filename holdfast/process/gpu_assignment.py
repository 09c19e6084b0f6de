"""The GPUs of a machine that a whole group shares: each rank gets its share when it starts.

A process sees the GPUs that its environment names when it first calls CUDA, and never others. So a warm
process calls nothing of CUDA while it waits: it gets its GPUs with its rank, whichever member had that rank
before. And it begins when the process that had them has ended, which frees their memory.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import sys
from collections.abc import Mapping
from pathlib import Path

from holdfast.protocol import environment

VISIBLE = "CUDA_VISIBLE_DEVICES"
# Torch's first look for GPUs is a call to CUDA, unless this variable has it ask NVML.
WITHOUT_CUDA = ("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
TURN_PREFIX = "device-"  # of the files in which processes sign for a device
TURN_S = 30.0  # for a process that was killed to be gone: the driver frees what it held
_OPEN_BY_CUDA = "nvidia-uvm"  # which NVML does not open


def share(given: Mapping[str, str], rank: int, local_rank: int, nproc: int) -> str:
    """Return CUDA_VISIBLE_DEVICES for `rank`'s member; "" where there is nothing to share, or too little.

    `given` is the launcher's environment. The member with ranks 0 to `nproc` - 1 has the first GPUs, and so
    on. Each of its ranks sees all of them, and uses the one of its number on the member, as with torchrun.
    """
    words = given.get(environment.DEVICES, "").split(",")
    first = rank - local_rank
    chosen = words[first : first + nproc]
    return ",".join(chosen) if len(chosen) == nproc and all(chosen) else ""


def uses_cuda(descriptors: Path = Path("/proc/self/fd")) -> bool:
    """Return True if this process has called CUDA: then it sees the GPUs of that moment from now on."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return True
    for each in descriptors.iterdir():
        with contextlib.suppress(OSError):
            if each.readlink().name.endswith(_OPEN_BY_CUDA):
                return True
    return False


def take(visible: str, local_rank: int, turns: Path) -> bool:
    """Let this process see the devices `visible`, once the process that had this rank's one before has ended.

    `turns` is a folder that all of the machine's ranks share. False when it has not ended within `TURN_S`:
    the driver may never let it go, and CUDA will report what is wrong then.
    """
    os.environ[VISIBLE] = visible
    name = visible.split(",")[local_rank].strip().replace("/", "_")
    with open(turns / f"{TURN_PREFIX}{name}", "a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # held by another successor of the same process, at most
        file.seek(0)
        ended = _ended(file.read(64), TURN_S)
        file.truncate(0)
        file.write(_sign(os.getpid()))
    return ended


def _sign(pid: int) -> bytes:
    """Return what distinguishes a process from all others of this machine: its pid, and when it began."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return b""
    return b"%d %s" % (pid, text[text.rindex(b")") + 2 :].split()[19])


def _ended(sign: bytes, limit_s: float) -> bool:
    """Wait until the process with this sign has ended and has given back its memory and devices."""
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

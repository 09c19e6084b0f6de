"""Recognize signs of hardware problems in the faults of a run. Pure.

A sign is sure if the driver itself names the hardware. The script can also cause the other signs: an illegal
memory access usually comes from a wrong index, and a bus error from a full /dev/shm. These signs count only
if they recur on one node (`repeats`). The patterns match messages of CUDA, the NVIDIA driver and NCCL.
https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from supervisor.view.model import Fault
from supervisor.view.replica_divergence import KIND as DIVERGED

SIGBUS = 7


class HardwareSign(NamedTuple):
    """A sign of faulty hardware. `what` is a phrase for users."""

    what: str
    is_sure: bool


_SURE = (
    (
        re.compile(r"uncorrectable ECC error|cudaErrorECCUncorrectable|CUDA_ERROR_ECC_UNCORRECTABLE"),
        "an ECC error",
    ),
    (re.compile(r"NVRM: Xid|\bXid \(PCI"), "an Xid"),
    (re.compile(r"has fallen off the bus|\bGPU is lost"), "a lost GPU"),
    (
        re.compile(r"[Uu]ncorrectable NVLink error|cudaErrorNvlinkUncorrectable|CUDA_ERROR_NVLINK_UNCORR"),
        "NVLink",
    ),
)
_LIKELY = (
    (
        re.compile(r"nvlink or a hardware error|cudaErrorContained|CUDA_ERROR_CONTAINED"),
        "a contained GPU error",
    ),
    (re.compile(r"[Hh]ardware stack error|cudaErrorHardwareStackError"), "a hardware stack error"),
    (re.compile(r"unspecified launch failure|cudaErrorLaunchFailure"), "a CUDA launch failure"),
    (re.compile(r"illegal memory access was encountered|cudaErrorIllegalAddress"), "an illegal address"),
    (re.compile(r"CUDA error: (?:unknown error|misaligned address|an illegal instruction)"), "a CUDA error"),
)
# The script causes these errors, even if one of the texts above follows. After a failed assertion in a
# kernel, every later call on the device returns an error.
_SCRIPT = re.compile(r"device-side assert|out of memory|no kernel image|invalid device ordinal")
_SHARED_MEMORY = re.compile(r"shared memory|/dev/shm|No space left on device", re.IGNORECASE)
# "NET/IB : Got completion from peer 10.2.0.5<33092> with error 12, opcode 0, len 0, vendor err 129"
_PEER = re.compile(r"NET/IB\S* ?: Got completion from peer ([0-9a-fA-F.:]+)<\d+> with (?:error|status)")


def sign_of(fault: Fault) -> HardwareSign | None:
    """Return the sign of hardware in a fault; None if it has none, or if a peer or the script explains it."""
    if fault.kind == DIVERGED:
        return HardwareSign("a replica that no longer matches", False) if fault.member else None
    if fault.kind not in ("crash", "exception"):
        return None
    text = f"{fault.detail}\n{fault.message}"
    for pattern, what in _SURE:
        if pattern.search(text):
            return HardwareSign(what, True)
    if _SCRIPT.search(text):
        return None
    for pattern, what in _LIKELY:
        if pattern.search(text):
            return HardwareSign(what, False)
    if fault.signal == SIGBUS and not _SHARED_MEMORY.search(text):
        return HardwareSign("SIGBUS", False)
    return None


def accused_address(faults: Iterable[Fault]) -> str:
    """Return the address that NCCL names in the faults; "" if it names none, or several.

    NCCL also names a peer that has crashed, so the result is meaningful only if no peer has crashed.
    """
    found = {address for each in faults for address in _PEER.findall(each.message)}
    return found.pop() if len(found) == 1 else ""

"""Texts of real faults, and whether they are signs of hardware."""

from __future__ import annotations

from typing import Any

import pytest

from supervisor.cluster.hardware import signs
from supervisor.cluster.hardware.signs import HardwareSign
from supervisor.view.model import Fault
from tests.unit.supervisor.job_views import fault

CUDA = (
    "RuntimeError: CUDA error: {}\nCUDA kernel errors might be asynchronously reported at some other API call"
)
# https://github.com/NVIDIA/nccl/issues: a peer that no longer acknowledges
LOST_PEER = "n2:57:59 [0] net_ib.cc:1296 NCCL WARN NET/IB : Got completion from peer {}<33092> with error 12"


def raised(text: str, **given: Any) -> Fault:
    return fault("exception", message=f"Traceback (most recent call last):\n{text}", **given)


@pytest.mark.parametrize(
    ("text", "what", "is_sure"),
    [
        (CUDA.format("uncorrectable ECC error encountered"), "an ECC error", True),
        (CUDA.format("uncorrectable NVLink error detected during the execution"), "NVLink", True),
        ("[ 93.1] NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.", "an Xid", True),
        (CUDA.format("unspecified launch failure"), "a CUDA launch failure", False),
        (CUDA.format("an illegal memory access was encountered"), "an illegal address", False),
        (CUDA.format("unknown error"), "a CUDA error", False),
        (
            CUDA.format("Invalid access of peer GPU memory over nvlink or a hardware error"),
            "a contained GPU error",
            False,
        ),
    ],
)
def test_what_the_driver_reports_is_a_sign(text: str, what: str, is_sure: bool) -> None:
    assert signs.sign_of(raised(text)) == HardwareSign(what, is_sure)


@pytest.mark.parametrize(
    "text",
    [
        "ValueError: shapes do not match",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB",
        CUDA.format("device-side assert triggered"),
        CUDA.format("device-side assert triggered") + CUDA.format("an illegal memory access was encountered"),
        CUDA.format("no kernel image is available for execution on the device"),
        CUDA.format("invalid device ordinal"),
    ],
)
def test_what_the_script_did_is_no_sign(text: str) -> None:
    assert signs.sign_of(raised(text)) is None


def test_a_bus_error_is_a_sign_unless_shared_memory_is_full() -> None:
    crash = fault("crash", signal=7)
    assert signs.sign_of(crash) == HardwareSign("SIGBUS", False)
    full = "ERROR: Unexpected bus error encountered in worker. Perhaps insufficient shared memory"
    assert signs.sign_of(fault("crash", signal=7, message=full)) is None
    assert signs.sign_of(fault("crash", signal=11)) is None
    assert signs.sign_of(fault("crash", signal=9)) is None


def test_a_replica_that_differs_is_a_sign_if_a_majority_names_it() -> None:
    assert signs.sign_of(fault("diverged")) == HardwareSign("a replica that no longer matches", False)
    assert signs.sign_of(fault("diverged", member="")) is None


@pytest.mark.parametrize("kind", ["victim", "hang", "nan", "member_lost", "departure", "exit"])
def test_other_kinds_are_no_sign(kind: Any) -> None:
    assert signs.sign_of(fault(kind, message=CUDA.format("uncorrectable ECC error encountered"))) is None


def test_nccl_accuses_a_peer_only_if_all_name_the_same() -> None:
    one, other = (fault("victim", message=LOST_PEER.format(each)) for each in ("10.2.0.5", "10.2.0.6"))
    assert signs.accused_address([one, one, fault("victim")]) == "10.2.0.5"
    assert signs.accused_address([one, other]) == ""
    assert signs.accused_address([fault("victim")]) == ""
    newer = "NCCL WARN NET/IB: Got completion from peer fe80::1<51161> with status=IBV_WC_RETRY_EXC_ERR(12)"
    assert signs.accused_address([fault("victim", message=newer)]) == "fe80::1"

"""Lines that kernels and drivers of several versions print in different forms mean the same."""

from __future__ import annotations

import pytest

from tests.unit.nodeagent.kernel.world import LINES

FORMS = {
    "kernel_xfs_shutdown": (
        "XFS (sdb6): Filesystem has been shut down due to log error (0x2).",
        "XFS (dm-0): All device paths lost.  Shutting down filesystem",
        "XFS (sdb6): Log I/O Error (0x2) detected at xlog_ioend_work+0x6f/0x90 [xfs] (fs/xfs/xfs_log.c:1379)."
        "  Shutting down filesystem.",
    ),
    "kernel_oops": (
        "Oops: 0002 [#1] PREEMPT SMP NOPTI",
        "Oops: general protection fault, probably for non-canonical address 0xdead: 0000 [#1] SMP",
        "general protection fault, probably for non-canonical address 0xdead000000000100: 0000 [#1] SMP PTI",
        "divide error: 0000 [#1] PREEMPT SMP",
        "invalid opcode: 0000 [#2] SMP",
        "Internal error: Oops - BUG: 0 [#1] SMP",
        "Internal error: synchronous external abort: 96000210 [#1] SMP",
    ),
    "kernel_task_hung": (
        "INFO: task python3:31337 blocked for more than 120 seconds.",
        "INFO: task rank[0]:31337 blocked for more than 120 seconds.",
        "INFO: task dl(3):31337 blocked for more than 120 seconds.",
        "INFO: task python3:31337 blocked in I/O wait for more than 120 seconds.",
    ),
    "xid": (
        "NVRM: GPU at 0000:3b:00.0 has fallen off the bus.",
        "NVRM: GPU 0000:3b:00.0: GPU has fallen off the bus.",
        "NVRM: GPU 0000:3b:00.0\nNVRM: has fallen off the bus.",
        "NVRM: The NVIDIA GPU 0000:3b:00.0\nNVRM: (PCI ID: 10de:20b2) installed in this system has\n"
        "NVRM: fallen off the bus and is not responding to commands.",
        "NVRM: The NVIDIA GPU 0000:3b:00.0 (PCI ID: 10de:20b2)\nNVRM: installed in this system\n"
        "NVRM: has fallen off the bus and is not responding to commands.",
    ),
}


@pytest.mark.parametrize(
    ("check", "line"), [(check, line) for check, lines in FORMS.items() for line in lines]
)
def test_each_form_of_a_line_is_recognised(check: str, line: str) -> None:
    assert [each.check for each in LINES.read(line)] == [check]


@pytest.mark.parametrize(
    "line",
    [
        # a program of this name has crashed in a file of this name
        "INFO: task a[117]: segfault at 0 ip 0000 sp 0000 error 4 in x:9 blocked for more than 9 seconds.[1]",
        "INFO: task [7]: segfault at 0 ip 0000 sp 0000 error 4 in x:9 blocked for more than 9 seconds.[1]",
        "INFO: task a(7): drop_caches: 3",
        "traps: divide error[7] trap int3 ip:0 sp:0 error:0 in [#1[1+1]",
        "int3[117]: segfault at 0 ip 0000 sp 0000 error 4 in  [#1]",
    ],
)
def test_a_line_about_a_program_with_such_a_name_is_not(line: str) -> None:
    assert LINES.read(line) == ()

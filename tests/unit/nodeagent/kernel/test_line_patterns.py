from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.kernel.line_reader import LinePatterns
from nodeagent.kernel.nvidia_lines import LineFact
from nodeagent.model import MAX_TEXT
from nodeagent.policy import kernel_lines
from tests.unit.nodeagent.kernel.growth import growth
from tests.unit.nodeagent.kernel.world import LINES, NOTHING, TABLE, XID_79, raw

TOLD = kernel_lines.load_lines(TABLE)


def one(text: str) -> LineFact:
    [seen] = LINES.read(text)
    return seen


@pytest.mark.parametrize("line", TOLD, ids=lambda line: line.name)
def test_every_line_of_the_table_is_matched_by_its_example(line: kernel_lines.KernelLine) -> None:
    found = one(line.example)
    assert found.check == ("cleared" if line.ends else f"kernel_{line.name}")
    assert found.text == " ".join(line.example.split())[:MAX_TEXT]
    assert "{" not in found.entity


@pytest.mark.parametrize("line", TOLD, ids=lambda line: line.name)
def test_no_line_of_the_table_matches_text_quoted_by_another_line(line: kernel_lines.KernelLine) -> None:
    assert LINES.read(f"usb 1-1: Product: {line.example}") == ()


def test_the_drivers_lines_are_parsed_by_their_formats() -> None:
    assert (one(XID_79).check, one(XID_79).value) == ("xid", 79)


@pytest.mark.parametrize("text", ["", NOTHING, "Xid (", "fallen off the bus", "nfs: server \n OK"])
def test_other_lines_yield_no_fact(text: str) -> None:
    assert LINES.read(text) == ()


def test_entities_are_written_as_by_the_other_sensors() -> None:
    assert one("EXT4-fs (dm-1): Remounting filesystem read-only").entity == "disk/dm-1"
    assert one("mlx5_core 0000:5C:00.0 eth2: Port module event: module 0, Cable unplugged").entity == (
        "device/0000:5c:00.0"
    )
    assert one("nfs: server [fd00::1] not responding, still trying").entity == "nfs/_fd00::1_"


def test_out_of_memory_in_a_jobs_own_group_is_not_a_fault_of_the_node() -> None:
    group = one("Memory cgroup out of memory: Killed process 4242 (python3) total-vm:1kB")
    whole = one("Out of memory: Killed process 4242 (python3) total-vm:1kB")
    levels = {line.check: line.level.name for line in TOLD}
    assert (levels[group.check], levels[whole.check]) == ("HEALTHY", "DEGRADED")
    assert dict(group.facts) == {"pid": "4242", "task": "python3"}
    assert LINES.read("oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),task=python3,pid=1,uid=0") == ()


@pytest.mark.parametrize(
    "name", ["nvidia-cat", "nvidia-modeset/", "nv_queue", "nv_open_q", "nvtop", "python3"]
)
@pytest.mark.parametrize(
    ("line", "check"),
    [
        ("INFO: task {}:77 blocked for more than 120 seconds.", "kernel_task_hung"),
        ("watchdog: BUG: soft lockup - CPU#12 stuck for 26s! [{}:4321]", "kernel_soft_lockup"),
        ("Out of memory: Killed process 4242 ({}) total-vm:1kB", "kernel_oom"),
        ("{}: attempt to access beyond end of device\nsda1: rw=1, sector=8", "kernel_beyond_end_of_device"),
    ],
)
def test_the_name_of_a_process_does_not_change_the_finding(line: str, check: str, name: str) -> None:
    found = one(line.format(name))
    assert (found.check, found.entity) == (check, "disk/sda1" if "sda1" in line else "node")


@pytest.mark.parametrize(
    ("line", "check"),
    [
        ("nvme nvme0: I/O 258 QID 4 timeout, reset controller", "kernel_nvme_timeout"),
        ("BUG: soft lockup - CPU#3 stuck for 22s! [a:b:1234]", "kernel_soft_lockup"),
        ("NMI watchdog: Watchdog detected hard LOCKUP on cpu 5", "kernel_hard_lockup"),
        ("rcu: INFO: rcu_sched self-detected stall on CPU", "kernel_rcu_stall"),
        ("Oops: Oops: 0002 [#1] PREEMPT SMP NOPTI", "kernel_oops"),
        ("Oops: general protection fault, probably for non-canonical address 0xdead: 0000 [#1] SMP",
         "kernel_oops"),
        ("Internal error: Oops: 0000000096000004 [#1] SMP", "kernel_oops"),
        ("Oops: Kernel access of bad area, sig: 11 [#1]", "kernel_oops"),
        ("EDAC MC1: 2 UE on mc#1csrow#0 (csrow:0 channel:0 page:0x0 offset:0x0 grain:8)",
         "kernel_memory_uncorrected"),
        ("XFS (sda1): I/O Error Detected. Shutting down filesystem", "kernel_xfs_shutdown"),
        ("XFS (sda1): User initiated shutdown (0x1) received. Shutting down filesystem",
         "kernel_xfs_shutdown"),
        ("XFS (sda1): Corruption of in-memory data detected.  Shutting down filesystem",
         "kernel_xfs_shutdown"),
        ("XFS (rbd0): Metadata I/O Error (0x1) detected at xfs_trans_read_buf_map+0x1a/0x2b [xfs] "
         "(fs/xfs/xfs_trans_buf.c:296).  Shutting down filesystem.", "kernel_backed_xfs_shutdown"),
        ("attempt to access beyond end of device\nsda1: rw=0, want=8", "kernel_beyond_end_of_device"),
        ("mlx5_core 0000:5d:00.0: cmd_work_handler:877:(pid 1): cmd[3]: QUERY_VPORT(0x750) Async, timeout. "
         "Will cause a leak of a command resource", "kernel_mlx5_command_timeout"),
        ("mlx5_core 0000:5c:00.0 eth0: NETDEV WATCHDOG: CPU: 12: transmit queue 0 timed out 5000 ms",
         "kernel_transmit_timeout"),
        ("eth0: NETDEV WATCHDOG: CPU: 12: transmit queue 0 timed out 5000 ms", "kernel_transmit_timeout"),
        ("pcieport 0000:00:01.0: AER: Multiple Uncorrected (Fatal) error received: 0000:01:00.0",
         "kernel_aer_fatal"),
    ],
)  # fmt: skip
def test_lines_of_other_kernel_versions_are_also_matched(line: str, check: str) -> None:
    assert one(line).check == check


def test_no_line_of_the_table_is_lost_by_the_prefilter() -> None:
    assert not LINES.may_match(NOTHING)
    assert all(LINES.may_match(line.example) for line in TOLD)
    assert all(LINES.may_match_raw(raw(1, line.example)) for line in TOLD)
    assert not LINES.may_match_raw(raw(1, NOTHING))
    # If one hint is the beginning of another, the shorter one is enough.
    both = LinePatterns([replace(TOLD[0], has="INFO: task nv"), replace(TOLD[0], has="INFO: task ")])
    assert both.may_match("INFO: task python3:1 blocked")
    assert not LinePatterns([]).may_match("blocked")


@given(st.sampled_from([line.example for line in TOLD]), st.integers(0, 200), st.text(max_size=50))
def test_no_text_raises_an_exception(example: str, at: int, text: str) -> None:
    for seen in LINES.read(example[:at] + text + example[at:]):
        assert len(seen.text) <= MAX_TEXT


@pytest.mark.parametrize("fill", ["a", "a ", "0", ":", "(", "]: segfault at ", " timeout, ", "0000:"])
def test_hostile_lines_are_parsed_in_linear_time(fill: str) -> None:
    def work(length: int) -> None:
        for line in TOLD:
            head, _, tail = line.example.partition(line.has)
            room = fill * (length // len(fill))
            for hostile in (head + room + line.has + tail, line.has + room, head + line.has + room):
                LINES.read(hostile)

    assert growth(work, 128, 1024) < 24  # quadratic would be 64


def test_a_hint_that_the_log_would_escape_makes_every_record_relevant() -> None:
    odd = LinePatterns([replace(TOLD[0], has="a\\b")])
    assert odd.may_match_raw(raw(1, NOTHING))
    assert not odd.may_match(NOTHING)

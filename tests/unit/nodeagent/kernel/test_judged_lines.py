"""The findings from kernel lines, read as the sensors read them and evaluated by the shipped policy."""

from __future__ import annotations

import pytest

from nodeagent.evaluation.evaluator import Evaluator
from nodeagent.host.block_devices import OF_NODE
from nodeagent.kernel.line_reader import LineReader
from nodeagent.model import Action, Level, Observation
from nodeagent.policy.loading import shipped
from tests.unit.nodeagent.kernel.world import LINES, XID_79

GPU = "gpu/0000:3b:00.0"
NODES_DISK = "disk/nvme1"
XID = "NVRM: Xid (PCI:0000:3b:00): "


def judged(*lines: tuple[float, str]) -> dict[str, tuple[Level, Action]]:
    """Return the finding after the last line."""
    evaluator, sightings = Evaluator(shipped(), 575), LineReader(LINES, "kmsg")
    evaluator.add(Observation(0.0, "user_volume", NODES_DISK, "host", OF_NODE))
    for at_s, text in lines:
        for each in sightings.read(text, at_s):
            assert evaluator.add(each)
    return {v.entity: (v.level, v.action) for v in evaluator.verdicts(lines[-1][0] + 0.01) if v.findings}


def test_a_gpu_off_the_bus_needs_a_reboot() -> None:
    assert judged((5.0, XID_79))[GPU] == (Level.UNHEALTHY, Action.REBOOT_NODE)


def test_the_drivers_verdict_in_the_log_takes_precedence_over_the_table() -> None:
    said = "154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)"
    assert judged((5.0, XID_79), (5.1, XID + said))[GPU] == (Level.UNHEALTHY, Action.RESET_GPU)


def test_an_nvlink_5_error_is_as_severe_as_its_line_describes() -> None:
    fatal = "144, SAW_MVB         Fatal    XC0 i0 Link 00 (0x00000001 0x00000002 0x00000000 0x00000000)"
    benign = "144, SAW_MVB         Nonfatal XC0 i0 Link 00 (0x00000001 0x00000001 0x00000000 0x00000000)"
    assert judged((5.0, XID + fatal))[GPU] == (Level.UNHEALTHY, Action.RESET_GPU)
    assert judged((5.0, XID + benign)).get(GPU, (Level.HEALTHY, Action.NONE))[0] == Level.HEALTHY


def test_an_answering_nfs_server_ends_the_findings_about_that_server_only() -> None:
    slow = "nfs: server 10.0.0.{} not responding, still trying"
    found = judged((1.0, slow.format(8)), (1.0, slow.format(9)), (1.4, "nfs: server 10.0.0.9 OK"))
    assert found == {"nfs/10.0.0.8": (Level.DEGRADED, Action.NONE)}
    again = judged((1.0, slow.format(9)), (1.4, "nfs: server 10.0.0.9 OK"), (1.8, slow.format(9)))
    assert again == {"nfs/10.0.0.9": (Level.DEGRADED, Action.NONE)}


def test_a_gpu_that_does_not_initialise_needs_a_reset_and_then_a_replacement() -> None:
    line = "NVRM: GPU 0000:3b:00.0: RmInitAdapter failed! (0x62:0x40:2192)"
    assert judged((5.0, line), (6.0, line))[GPU] == (Level.UNHEALTHY, Action.RESET_GPU)
    assert judged((5.0, line), (86400.0, line))[GPU] == (Level.UNHEALTHY, Action.REPLACE)


@pytest.mark.parametrize(
    ("line", "entity", "level", "action"),
    [
        ("NVRM: GPU at PCI:0000:3b:00: RmInitAdapter failed! (0x24:0x65:1185)", GPU, 2, Action.RESET_GPU),
        ("NVRM: RmInitAdapter failed! (0x26:0x65:1292)", "driver", 2, Action.REBOOT_NODE),
        ("NVRM: RC watchdog: GPU is probably locked! Notify Timeout Seconds: 7", "driver", 1, None),
        ("NVRM: GPU0 krcWatchdog_IMPL: RC watchdog: GPU is probably locked!", "driver", 1, None),
        ("nvidia 0000:3b:00.0: probe with driver nvidia failed with error -1", GPU, 1, None),
        (
            "pcieport 0015:00:00.0: DPC: containment event, status:0x200d, ERR_FATAL received from 15:1:0.0",
            "device/0015:00:00.0", 2, Action.REBOOT_NODE,
        ),
        ("{763}[Hardware Error]: event severity: fatal", "node", 2, Action.REBOOT_NODE),
        ("[Hardware Error]: event severity: fatal", "node", 1, None),  # of the previous boot
        ("{2}[Hardware Error]: event severity: corrected", "node", 0, None),
        (
            "nvme nvme2: controller is down; will reset: CSTS=0xffffffff, PCI_STATUS read failed (134)",
            "disk/nvme2", 1, None,
        ),
        ("nvme nvme1: Removing after probe failure status: -19", NODES_DISK, 2, Action.REBOOT_NODE),
        ("nvme nvme3: Removing after probe failure status: -19", "disk/nvme3", 1, Action.RESTART_APP),
    ],
)  # fmt: skip
def test_lines_about_failing_hardware_have_the_level_that_they_deserve(
    line: str, entity: str, level: int, action: Action | None
) -> None:
    found = judged((5.0, line)).get(entity, (Level.HEALTHY, Action.NONE))
    assert found[0] == level
    assert action is None or found[1] is action


def test_a_job_that_exhausts_its_own_memory_does_not_degrade_the_node() -> None:
    found = judged((1.0, "Memory cgroup out of memory: Killed process 4242 (python3) total-vm:1kB"))
    assert found["node"][0] == Level.HEALTHY

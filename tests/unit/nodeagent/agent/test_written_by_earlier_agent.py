"""The state and the policy file that an earlier agent (commit 628c3a2) wrote are still used.

`memory.json` was written by that agent's own code: a node with a throttled GPU, retired pages, Xids 64 and
79, a bad InfiniBand port, and a full volume of a pod. `node.toml` is the example of its documentation.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from nodeagent.agent import saved_state
from nodeagent.agent.agent import Agent
from nodeagent.agent.policy_file import PolicyFile
from nodeagent.host.filesystems import FileSystems
from nodeagent.model import GONE, HealthFinding, Level, Observation
from nodeagent.policy import loading
from nodeagent.sensing.clock import Anchor, Clock

WRITTEN = Path(__file__).parent / "written_by_628c3a2"
GPU, PORT = "gpu/0000:3b:00.0", "port/mlx5_0/1"
PVC = "disk//var/lib/kubelet/pods/0b1/volumes/kubernetes.io~csi/pvc/mount"
SAMPLED = {
    "disk_used": PVC, "gpu_throttled": GPU, "ib_link_downed": PORT, "ib_symbol_errors": PORT,
    "retired_pages": GPU,
}  # fmt: skip


def agent(overrides: str | None = None) -> Agent:
    """Return an agent that has started from the saved state, in the boot in which it was written."""
    state, problems = saved_state.load(WRITTEN)
    assert problems == ()
    assert state.anchor is not None
    clock = Clock(Anchor(state.anchor.boot_id, state.last_s))
    made = Agent(loading.load(overrides), clock, state, None, lambda _: None)
    made.run_cycle()
    return made


def findings(made: Agent) -> dict[str, HealthFinding]:
    found = [each for one in made.published.verdicts for each in one.findings]
    return {each.check if each.code is None else f"xid {each.code}": each for each in found}


def test_its_findings_are_still_there() -> None:
    made = agent()
    found = findings(made)
    assert set(found) == {*SAMPLED, "xid 64", "xid 79"}
    assert {each.level for each in found.values()} == {Level.UNHEALTHY}
    assert made.published.problems == ()
    assert {each["kind"] for each in made.published.events} >= {"raised"}


@pytest.mark.parametrize("check", sorted(SAMPLED))
def test_a_finding_that_it_saved_ends_or_is_milder_once_the_operator_removes_its_bound(check: str) -> None:
    for line in ("unhealthy = false", "degraded = false", 'action = "none"'):
        rule = loading.shipped().rules[check]
        if line.startswith("degraded") and rule.degraded is None:
            continue
        made = agent(f"[checks.{check}]\n{line}\n")
        found = findings(made)
        assert made.published.problems == ()
        assert {"xid 64", "xid 79"} <= set(found)
        expected = Level.DEGRADED if line.startswith("unhealthy") else Level.UNHEALTHY
        assert found[check].level is expected


def test_its_policy_file_is_accepted(tmp_path: Path) -> None:
    file = PolicyFile(WRITTEN / "node.toml", tmp_path, required=True)
    assert file.current.problem == ""
    assert "checks.disk_used.unhealthy" in file.current.policy.overrides


def test_its_finding_about_a_volume_that_is_no_longer_mounted_ends(tmp_path: Path) -> None:
    made = agent()
    (tmp_path / "self").mkdir()
    (tmp_path / "self/mountinfo").write_text("36 35 8:1 / / rw - ext4 /dev/sda1 rw\n")
    anchor = made.state.anchor
    assert anchor is not None
    disks = FileSystems(str(tmp_path), None, anchor.boot_id, made.state.positions["host"])
    for _ in range(2):
        for each in disks.read(FileSystems.checks, 0.0):
            if each.check == GONE:
                seen = Observation(made.clock.now_s(), each.check, each.entity, "host", each.value)
                made.inbox.put([seen])
    made.run_cycle()
    assert set(findings(made)) == {*SAMPLED, "xid 64", "xid 79"} - {"disk_used"}

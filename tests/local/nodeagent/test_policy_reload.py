"""`serve` follows its policy file while it runs, and starts with any policy file and any saved state."""

from __future__ import annotations

import json
import os
import signal
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from nodeagent.agent.policy_file import KEPT
from nodeagent.agent.saved_state import NAME, VERSION
from tests.fakenvml.state import Fake
from tests.local.nodeagent.serving import node, serving

GOOD = '[xid.63]\nlevel = "degraded"\n'
BAD = '[xid.63]\nlevel = "terrible"\n'


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[Fake]:
    with Fake(tmp_path / "fake", gpus=2) as made:
        yield made


def test_a_policy_file_is_followed_without_a_restart_and_a_bad_one_stops_no_agent(
    tmp_path: Path, fake: Fake
) -> None:
    state, folder = tmp_path / "state", tmp_path / "map"
    for name, text in (("one", ""), ("two", GOOD), ("three", BAD)):
        (folder / name).mkdir(parents=True)
        (folder / name / "node.toml").write_text(text)
    (folder / "..data").symlink_to("one")
    (folder / "node.toml").symlink_to("..data/node.toml")
    words = ("--policy", str(folder / "node.toml"))

    def switch(name: str) -> None:
        """Switch all files of the folder at once, as kubelet does for a ConfigMap."""
        (folder / "..next").symlink_to(name)
        os.replace(folder / "..next", folder / "..data")

    with serving(state, fake, *words) as agent:
        fake.until(lambda s: s.event_sets > 0)
        fake.xid(0, 63)
        assert agent.finding(fake.entity(0), "xid", 63)["level"] == "healthy"
        first = agent.get("/v1/health")["policy"]
        switch("two")
        changed = agent.until(lambda health: bool(health["policy"] != first))
        agent.until(lambda health: bool(health["level"] == "degraded"))
        assert changed["problems"] == []
        switch("three")
        agent.process.send_signal(signal.SIGHUP)
        found = agent.until(lambda health: bool(health["problems"]))
        assert (found["policy"], found["level"]) == (changed["policy"], "degraded")
        assert "holdfast_node_policy_rejected 1.0" in agent.get("/metrics")
        switch("two")
        agent.until(lambda health: not health["problems"])
        (folder / "two" / "node.toml").write_text("")  # as by a full disk
        found = agent.until(lambda health: bool(health["problems"]))
        assert "it has become empty" in found["problems"][0]
        assert (found["policy"], found["level"]) == (changed["policy"], "degraded")
        switch("three")
        agent.until(lambda health: "terrible" in "".join(health["problems"]))
        agent.end()
    with serving(state, fake, *words) as agent:
        found = agent.until(lambda health: bool(health["problems"]))
        assert f"the last good policy ({state / KEPT}) remains in force" in found["problems"][0]
        assert "xid.63.level = 'terrible'" in found["problems"][0]
        assert agent.finding(fake.entity(0), "xid", 63)["level"] == "degraded"
        agent.end()
    assert node("explain", "xid", "63", *words).returncode == 2, "a person who asks gets all mistakes"


def test_an_agent_starts_with_a_bad_policy_and_the_memory_of_a_newer_agent_and_says_so(
    tmp_path: Path, fake: Fake
) -> None:
    raw = json.dumps({"version": VERSION + 1}).encode()
    (tmp_path / NAME).write_bytes(b"%08x %d\n" % (zlib.crc32(raw), len(raw)) + raw)
    policy = tmp_path / "node.toml"
    policy.write_text(BAD)
    with serving(tmp_path, fake, "--policy", str(policy)) as agent:
        found = agent.until(lambda health: len(health["problems"]) == 2)
        assert "it is kept as memory.version-2.json" in found["problems"][0]
        assert "the shipped policy is in force" in found["problems"][1]
        fake.until(lambda s: s.event_sets > 0)
        fake.xid(0, 79)
        assert agent.finding(fake.entity(0), "xid", 79)["action"] == "reboot_node"
        agent.end()
    assert (tmp_path / "memory.version-2.json").read_bytes().endswith(raw)
    assert (tmp_path / NAME).exists()

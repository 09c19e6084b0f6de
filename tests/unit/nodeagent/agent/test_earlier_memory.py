"""The memory that an agent of commit 628c3a2 wrote is read, with all that stood in it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from nodeagent.agent import saved_state
from nodeagent.evaluation.evaluator import Evaluator
from nodeagent.evaluation.retention import FORGET_S
from nodeagent.model import Action, HealthFinding, Observation
from nodeagent.policy.loading import shipped

DAY_S = 86400.0
FILE = Path(__file__).with_name("memory_of_628c3a2.json")
FIRST, SECOND = "gpu/0000:3b:00.0", "gpu/0000:4b:00.0"


def remembered(folder: Path) -> Evaluator:
    shutil.copy(FILE, folder / saved_state.NAME)
    state, problems = saved_state.load(folder)
    assert problems == ()
    made = Evaluator(shipped(), 575)
    made.load(state.evidence)
    made.begin(state.last_s)
    return made


def brief(found: tuple[HealthFinding, ...]) -> list[tuple[str, str, int | None, str]]:
    return [(each.entity, each.check, each.code, each.action.name) for each in found]


def test_what_stood_in_it_stands_and_what_was_remedied_has_ended(tmp_path: Path) -> None:
    made = remembered(tmp_path)
    found = made.findings(DAY_S + 700)
    assert brief(found) == [
        ("disk//data", "disk_used", None, "CONTACT_SUPPORT"),
        (FIRST, "xid", 79, "REPLACE"),
        (SECOND, "row_remap_failure", None, "REPLACE"),
        (SECOND, "ecc_dbe", None, "RESET_GPU"),
    ], "64 is over: the GPU was reset, as the driver recommended"
    assert [each.since_s for each in found if each.code == 79] == [DAY_S], "the reboot ended the first one"
    assert {each.device for each in found} == {""}, "it has no sightings"
    assert found[1].sources == ("kmsg", "nvml-events"), "it has no times, so both may have seen this burst"
    made.forget(DAY_S + 2 * FORGET_S)
    assert brief(made.findings(DAY_S + 2 * FORGET_S)) == brief(found)


def test_the_remedies_of_what_stood_in_it_are_recognised(tmp_path: Path) -> None:
    made = remembered(tmp_path)
    made.add(Observation(2 * DAY_S, "gpu_reset", SECOND, "nvml-polling"))
    made.add(Observation(2 * DAY_S, "boot", "node", "agent"))
    found = made.findings(3 * DAY_S)
    assert [each.code for each in found if each.entity == FIRST] == [79], "it asks for another GPU"
    assert "ecc_dbe" not in {each.check for each in found}
    facts = (("uuid", "GPU-c"), ("name", "NVIDIA H100"))
    made.add(Observation(3 * DAY_S, "replaced", FIRST, "nvml-polling"))
    made.add(Observation(3 * DAY_S + 1, "gpu_state", FIRST, "nvml-polling", facts=facts))
    assert FIRST not in {each.entity for each in made.findings(4 * DAY_S)}


def test_an_agent_of_that_commit_finds_all_that_it_reads_where_it_was(tmp_path: Path) -> None:
    stored = json.loads(FILE.read_text().partition("\n")[2])["evidence"]
    again = remembered(tmp_path).dump()
    for key in ("series", "events"):
        assert [[*row[:2], *row[-2:]] for row in again[key]] == [[*row[:2], *row[-2:]] for row in stored[key]]


def test_evidence_of_events_that_the_policy_no_longer_has_is_omitted() -> None:
    made = Evaluator(shipped(), 575)
    made.add(Observation(1.0, "xid", FIRST, "kmsg", 79.0))
    stored = made.dump()
    stored["events"].append(["node", "kernel_line_of_another_version", 0, "", [[[1.0, 1.0]], [], ["kmsg"]]])
    restored = Evaluator(shipped(), 575)
    restored.load(json.loads(json.dumps(stored)))
    assert [(each.check, each.action) for each in restored.findings(2.0)] == [("xid", Action.REBOOT_NODE)]

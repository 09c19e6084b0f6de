from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from supervisor.nodes import node_objects, patches
from supervisor.nodes.names import CONDITION, RECORD, REQUEST, TAINT
from supervisor.nodes.patches import DecisionNote, condition_of, main_patch, taints_after
from supervisor.quarantine.model import OPERATOR, PREFER_NOT, Quarantine
from tests.unit.supervisor.nodes.node_samples import AT, FOREIGN, node_object

HELD = Quarantine(("k",), "reboot_node", ("kmsg",), "b1", 5.0)
OURS = {"key": TAINT, "value": "reboot_node", "effect": "NoSchedule"}
NOTE = DecisionNote("holdfast", "Xid 79")
_TAINTS = st.lists(
    st.fixed_dictionaries(
        {"key": st.sampled_from(["a", "z", TAINT]), "effect": st.sampled_from(["NoSchedule", "NoExecute"])},
        optional={"value": st.text("xy", max_size=2), "timeAdded": st.just(AT)},
    ),
    max_size=5,
)


def test_taint_and_record_are_one_patch_that_is_only_for_the_version_that_was_read() -> None:
    known = node_objects.read(node_object(annotations={REQUEST: "release"}))
    body = main_patch(known, replace(known.view, quarantine=HELD), NOTE, AT)
    record = body["metadata"]["annotations"].pop(RECORD)
    assert body == {
        "metadata": {"resourceVersion": "1", "annotations": {REQUEST: None}},
        "spec": {"taints": [*FOREIGN, OURS]},
    }
    assert json.loads(record) == {
        "quarantine": {
            "evidence": ["k"], "action": "reboot_node", "sources": ["kmsg"], "boot_id": "b1", "at_s": 5.0,
        },
        "by": "holdfast", "why": "Xid 79", "at": AT,
    }  # fmt: skip


def test_bookkeeping_keeps_the_last_decision_and_leaves_the_taints_out() -> None:
    told = {"by": "operator", "why": "smell", "at": AT}
    known = node_objects.read(node_object(annotations={RECORD: json.dumps(told)}))
    body = main_patch(known, known.view, None, "later")
    assert "spec" not in body
    assert json.loads(body["metadata"]["annotations"][RECORD]) == told


@given(_TAINTS, st.sampled_from([None, HELD, replace(HELD, effect=PREFER_NOT), replace(HELD, action="none")]))
def test_foreign_taints_remain_as_they_are_and_in_their_order(
    taints: list[dict[str, Any]], held: Quarantine | None
) -> None:
    after = taints_after(tuple(taints), held)
    assert [each for each in after if each["key"] != TAINT] == [
        each for each in taints if each["key"] != TAINT
    ]
    ours = [each for each in after if each["key"] == TAINT]
    assert len(ours) == (held is not None)
    assert taints_after(tuple(after), held) == after
    if held is not None:
        assert (ours[0]["value"], ours[0]["effect"]) == (held.action, held.effect)


def test_our_taint_keeps_its_time_while_it_says_the_same() -> None:
    stamped = {**OURS, "timeAdded": AT}
    assert taints_after((stamped, *FOREIGN), HELD) == [stamped, *FOREIGN]
    costlier = taints_after((stamped, *FOREIGN), replace(HELD, action="replace"))
    assert costlier == [*FOREIGN, {**OURS, "value": "replace"}]
    by_operator = replace(HELD, action="none", sources=(OPERATOR,))
    assert patches.taint_value(by_operator) == OPERATOR
    assert patches.taint_value(replace(by_operator, action="replace")) == "replace"


def test_a_long_reason_is_cut() -> None:
    known = node_objects.read(node_object())
    body = main_patch(known, known.view, DecisionNote("holdfast", "x" * 10_000), AT)
    assert len(body["metadata"]["annotations"][RECORD]) < 1200


def record(held: Quarantine | None, by: str = "holdfast") -> dict[str, str]:
    after = replace(node_objects.read(node_object()).view, quarantine=held)
    body = main_patch(node_objects.read(node_object()), after, DecisionNote(by, "why"), AT)
    return {RECORD: body["metadata"]["annotations"][RECORD]}


def test_the_condition_says_what_the_record_says_and_is_written_only_if_it_differs() -> None:
    assert condition_of(node_objects.read(node_object())) is None
    assert condition_of(node_objects.read(node_object(annotations=record(None)))) is None
    found = node_object(annotations=record(HELD))
    wanted = {
        "type": CONDITION, "status": "True", "reason": "RebootNode", "message": "why",
        "lastTransitionTime": AT,
    }  # fmt: skip
    assert condition_of(node_objects.read(found)) == wanted
    found["status"]["conditions"].append({**wanted, "lastTransitionTime": "later"})
    assert condition_of(node_objects.read(found)) is None
    found["metadata"]["annotations"] = record(replace(HELD, action="replace"))
    changed = condition_of(node_objects.read(found))
    assert changed == {**wanted, "reason": "Replace", "lastTransitionTime": "later"}
    for held, by, reason in (
        (None, "holdfast", "Released"),
        (None, "operator", "ReleasedByOperator"),
        (replace(HELD, effect=PREFER_NOT), "holdfast", "Avoided"),
    ):
        found["metadata"]["annotations"] = record(held, by)
        changed = condition_of(node_objects.read(found))
        assert changed is not None
        assert (changed["status"], changed["reason"], changed["lastTransitionTime"]) == ("False", reason, AT)


def test_an_unreadable_record_changes_no_condition() -> None:
    assert condition_of(node_objects.read(node_object(annotations={RECORD: "{"}))) is None

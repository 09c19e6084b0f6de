from __future__ import annotations

import pytest

from nodeagent.model import Action, Level
from nodeagent.policy.loading import load, shipped
from nodeagent.policy.overriding import MAX_CHARACTERS
from nodeagent.policy.rules import Bound, Clears, Recurs
from nodeagent.policy.validation import BadPolicy

POLICY = shipped()
DAY_S = 86400.0


def refused(text: str) -> tuple[str, ...]:
    with pytest.raises(BadPolicy) as caught:
        load(text, "mine.toml")
    return caught.value.messages


# -- what an operator can say


def test_an_overridden_action_changes_the_clearing_condition_and_beats_the_driver() -> None:
    found = load('[xid.79]\naction = "replace"').xids[79]
    assert (found.level, found.action, found.clears) == (Level.UNHEALTHY, Action.REPLACE, Clears.REPLACED)
    assert found.overridden
    assert found.recurs is None, "there is no escalation to the same level"
    assert not POLICY.xids[79].overridden


def test_an_event_that_the_operator_calls_healthy_needs_no_action_and_never_escalates() -> None:
    found = load('[xid.79]\nlevel = "healthy"').xids[79]
    assert (found.level, found.action, found.clears, found.recurs) == (
        Level.HEALTHY, Action.NONE, Clears.TIME, None,
    )  # fmt: skip
    assert load('[xid.13]\nlevel = "healthy"').xids[13].recurs is None


def test_an_escalation_set_by_the_operator_is_kept() -> None:
    text = '[xid.79]\nlevel = "healthy"\nrecurs_bursts = 3\n[xid.31]\nrecurs_bursts = 0'
    found = load(text).xids
    assert found[79].recurs == Recurs(3, 7 * DAY_S, Level.UNHEALTHY, Action.REPLACE)
    assert found[31].recurs is None


def test_a_new_escalation_must_be_complete() -> None:
    text = (
        '[xid.43]\nrecurs_bursts = 3\nrecurs_within_s = 60\nrecurs_level = "degraded"\nrecurs_action = "none"'
    )
    assert load(text).xids[43].recurs == Recurs(3, 60.0, Level.DEGRADED, Action.NONE)
    assert (
        "recurs_within_s, recurs_level, recurs_action must be set"
        in refused("[xid.43]\nrecurs_bursts = 3")[0]
    )


def test_a_hold_time_alone_keeps_the_drivers_verdict() -> None:
    found = load("[xid.79]\nhold_s = 60")
    assert found.xids[79].hold_s == 60
    assert not found.xids[79].overridden
    assert found.overrides == ("xid.79.hold_s",)


def test_a_code_that_no_table_has_can_get_a_meaning() -> None:
    found = load('[xid.199]\nlevel = "unhealthy"\naction = "reset_gpu"\nname = "ours"')
    meaning = found.meaning("xid", 199)
    assert (meaning.name, meaning.action, meaning.clears) == ("ours", Action.RESET_GPU, Clears.RESET)
    assert found.meaning("xid", 198) == POLICY.unknown_xid


def test_an_sxid_a_kernel_line_and_an_event_can_be_overridden() -> None:
    found = load(
        '[sxid.12020]\naction = "replace"\n[kernel.oom]\nlevel = "degraded"\n'
        '[checks.gpu_unavailable]\naction = "reboot_node"'
    )
    assert found.meaning("sxid", 12020, "non-fatal").action is Action.REPLACE
    assert found.meaning("kernel_oom", 0).level is Level.DEGRADED
    assert found.meaning("gpu_unavailable", 0).clears is Clears.BOOT
    assert all(found.meaning(*each).overridden for each in (("sxid", 12020), ("kernel_oom", 0)))


def test_a_bound_keeps_its_unset_fields_and_false_removes_it() -> None:
    found = load(
        "[checks.gpu_temperature_margin]\ndegraded.at = 8\nunhealthy = false\nclear_at = 12\n"
        "[checks.ecc_sbe]\nunhealthy = { at = 1000 }\nwindow_s = 120"
    )
    margin, ecc = found.rules["gpu_temperature_margin"], found.rules["ecc_sbe"]
    assert (margin.degraded, margin.unhealthy, margin.clear_at) == (Bound(8, need=3, of=4), None, 12)
    assert (ecc.degraded, ecc.unhealthy, ecc.window_s) == (Bound(100), Bound(1000), 120)


def test_a_state_is_set_by_its_name() -> None:
    found = load('[checks.gpu_state.states]\nlost = { action = "replace" }\nvanished.for_s = 120')
    states = {each.word: each for each in found.rules["gpu_state"].states.values()}
    assert (states["lost"].level, states["lost"].action) == (Level.UNHEALTHY, Action.REPLACE)
    assert states["vanished"].for_s == 120
    assert states["ok"] == POLICY.rules["gpu_state"].states[0]


def test_an_empty_file_changes_only_the_version() -> None:
    found = load("")
    assert (found.rules, found.xids, found.sxids, found.overrides) == (
        POLICY.rules, POLICY.xids, POLICY.sxids, (),
    )  # fmt: skip
    assert found.version == f"{POLICY.version}+e3b0c442"


# -- messages about mistakes

MISTAKES = """
chekcs = 1
[xid.79]
action = "replce"
holds = 5
[xid.7x]
[xid.145]
hold_s = 5
[xid.13]
action = "reset_gpu"
[xid.45]
recurs_bursts = 1
[sxid.12020]
level = 2
[kernel.nfs]
[checks.gpu_temperature_margn]
[checks.gpu_temperature_margin]
kind = "rate"
degraded.at = 12
clear_s = -1
[checks.gpu_state.states.lst]
[checks.boot]
level = "unhealthy"
"""


def test_all_mistakes_are_reported_at_once_each_on_one_line_with_the_accepted_values() -> None:
    expected = [
        ("chekcs", "did you mean checks?"),
        ("xid.79.action = 'replce'", "expected none, restart_app", "did you mean replace?"),
        ("xid.79.holds", "did you mean hold_s?"),
        ("xid.7x", "a whole number from 0 to"),
        ("xid.145", "set level and action"),
        ("xid.13.action", "set level to degraded or unhealthy"),
        ("xid.45.recurs_bursts = 1", "2 or more, or 0"),
        ("sxid.12020.level = 2", "expected healthy, degraded, unhealthy"),
        ("kernel.nfs", "did you mean nfs_lock_lost?"),
        ("checks.gpu_temperature_margn", "did you mean gpu_temperature_margin?"),
        ("checks.gpu_temperature_margin.kind", "expected action, clear_at"),
        ("checks.gpu_temperature_margin.clear_s = -1", "a number from 0 to"),
        ("checks.gpu_temperature_margin.clear_at", "10 is on the bad side of the limit 12"),
        ("checks.gpu_state.states.lst", "did you mean lost?"),
        ("checks.boot", "nothing to set"),
    ]
    messages = refused(MISTAKES)
    assert len(messages) == len(expected), "\n".join(messages)
    for message, parts in zip(messages, expected, strict=True):
        assert message.startswith(f"mine.toml: {parts[0]}"), message
        assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    "text",
    [
        "[xid.79",
        "x = " + "[" * 5000,
        "x = " + "9" * 5000,
        "#" * (MAX_CHARACTERS + 1),
        '[xid]\n79 = "replace"',
        "xid = 79",
        "[xid.79]\nhold_s = inf",
        "[xid.79]\nhold_s = true",
        f"[xid.79]\nhold_s = {'9' * 400}",
        '[xid.79]\nname = "two\\nlines"',
        '[xid."٧٩"]',
        "[xid.079]",
        "[checks.ecc_sbe]\ndegraded = false",
        "[checks.ecc_sbe]\ndegraded = { of = 5000 }",
        "[checks.gpu_state]\nstates = []",
        "[checks.kernel_oom]",
    ],
)
def test_a_file_of_another_shape_is_refused_in_one_line(text: str) -> None:
    [message] = refused(text)
    assert message.isprintable()
    assert len(message) < 600


def test_a_flood_of_mistakes_is_truncated() -> None:
    messages = refused("".join(f"[xid.a{number}]\n" for number in range(500)))
    assert len(messages) == 101
    assert messages[-1] == "mine.toml: and 400 more"

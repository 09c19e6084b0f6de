from __future__ import annotations

import re

import pytest

from nodeagent.model import Action, Level
from nodeagent.policy.loading import FOLDER, sampled, shipped
from nodeagent.policy.rules import Bound, CheckState, RuleKind
from nodeagent.policy.validation import BadPolicy, load_toml

POLICY = shipped()
TEXT = (FOLDER / "checks.toml").read_text()


def test_every_number_of_every_check_has_a_source() -> None:
    for name, rule in POLICY.rules.items():
        assert rule.source.strip(), name
        assert rule.what.strip(), name
        if rule.meaning is not None:
            assert rule.meaning.source.strip(), name


def test_every_table_of_the_file_is_a_rule_of_its_kind() -> None:
    rules = sampled(TEXT)
    assert list(rules) == re.findall(r"^\[(\w+)\]$", TEXT, re.MULTILINE)
    for name, rule in rules.items():
        assert rule.check == name
        assert (rule.meaning is not None) == (rule.kind is RuleKind.EVENT), name
        assert bool(rule.states) == (rule.kind is RuleKind.STATE), name
        if rule.kind in (RuleKind.LEVEL, RuleKind.RATE):
            assert rule.degraded or rule.unhealthy, name


def test_each_check_of_the_node_or_the_agent_that_is_about_the_gpus_says_so() -> None:
    for name, table in load_toml(TEXT).items():
        if table["entity"] in ("node", "sensor"):
            about_gpus = re.search("gpu|nvidia|xid", f"{name} {table['what']}", re.IGNORECASE) is not None
            assert POLICY.rules[name].of_gpus is about_gpus, name


def test_the_kernel_lines_are_rules_beside_the_checks() -> None:
    assert POLICY.rules["kernel_remounted_read_only"].kind is RuleKind.EVENT


@pytest.mark.parametrize(
    ("name", "degraded", "unhealthy", "clear_s"),
    [
        ("gpu_temperature_margin", Bound(5, need=3, of=4), Bound(0, for_s=60), 120),
        ("ecc_sbe", Bound(100), None, 600),
        ("ecc_dbe", None, Bound(0), 600),
        ("retired_pages", Bound(50), Bound(60), 600),
        ("gpu_throttled", Bound(1, need=13, of=60), Bound(1, need=73, of=120), 600),
        ("pcie_replay", Bound(50), Bound(200), 90),
        ("gpu_count", None, Bound(1, need=2, of=2), 20),
        ("ib_link_downed", Bound(0), Bound(2), 600),
        ("ib_symbol_errors", Bound(12), Bound(120), 600),
        ("disk_used", Bound(90), Bound(98), 60),
        ("sensor_stuck", Bound(10), Bound(60), 20),
    ],
)
def test_the_limits_have_the_agreed_values(
    name: str, degraded: Bound | None, unhealthy: Bound | None, clear_s: float
) -> None:
    rule = POLICY.rules[name]
    assert (rule.degraded, rule.unhealthy, rule.clear_s) == (degraded, unhealthy, clear_s)


def test_the_states_have_the_agreed_values() -> None:
    asked = {state.word: (state.level, state.action) for state in _states("recovery_action")}
    assert asked["drain_p2p"] == (Level.DEGRADED, Action.RESET_GPU)
    assert asked["node_reboot"] == asked["system_reboot"] == (Level.UNHEALTHY, Action.REBOOT_NODE)
    assert asked["reset"] == asked["bus_reset"] == asked["drain_and_reset"]
    waits = {state.word: state.for_s for state in _states("nvml")}
    assert (waits["not_loaded"], waits["version_mismatch"]) == (60, 60)


def _states(name: str) -> list[CheckState]:
    return list(POLICY.rules[name].states.values())


LEVEL = '[x]\nentity = "gpu"\nkind = "level"\nwhat = "heat"\nsource = "ours"\n'
STATE = '[x]\nentity = "gpu"\nkind = "state"\nwhat = "bus"\nsource = "ours"\n'
RATE = LEVEL.replace("level", "rate")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('[x]\nkind = "levl"', ["what is missing", "source is missing", "did you mean level?"]),
        (LEVEL, ["neither degraded nor unhealthy"]),
        (LEVEL + "degraded = { need = 2, of = 3 }", ["x.degraded: at is missing"]),
        (LEVEL + "degraded = { at = 1, need = 4, of = 3 }", ["need = 4 of only 3"]),
        (LEVEL + "degraded = { at = 1, for = 3 }", ["x.degraded.for: not known; did you mean for_s?"]),
        (LEVEL + "degraded = { at = nan }", ["x.degraded.at = nan"]),
        (LEVEL + "degraded = { at = 5 }\nunhealthy = { at = 4 }", ["4 is reached before degraded.at 5"]),
        (RATE + "degraded = { at = 5 }\nclear_at = 6", ["6 is on the bad side of the limit 5"]),
        (LEVEL + "below = true\ndegraded = { at = 5 }\nunhealthy = { at = 6 }", ["6 is reached before"]),
        (LEVEL + "degraded = { at = 5 }\nclear_at = 5", ["5 is on the bad side of the limit 5"]),
        (LEVEL + "below = true\ndegraded = { at = 5 }\nclear_at = 4", ["4 is on the bad side of"]),
        (LEVEL + "degraded = 5", ["x.degraded = 5: expected a table such as"]),
        (LEVEL + "degraded = { at = 5 }\nwindow_s = 5", ["x.window_s: not known"]),
        (STATE, ["no state is healthy"]),
        (STATE + 'states = [{ value = "0", word = "ok" }]', ["a value and a word, each once"]),
        (
            STATE + 'states = [{ value = 0, word = "ok", level = "healthy", action = "reboot_node" }]',
            ["x.states.ok.action: reboot_node does not fit the level healthy"],
        ),
    ],
)
def test_a_check_with_a_mistake_is_refused(text: str, told: list[str]) -> None:
    with pytest.raises(BadPolicy) as refused:
        sampled(text)
    assert all(each in str(refused.value) for each in told), str(refused.value)

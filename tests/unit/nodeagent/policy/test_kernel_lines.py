from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.model import Action, Level
from nodeagent.policy import kernel_lines
from nodeagent.policy.kernel_lines import MAX_LINES, line_rules, load_lines
from nodeagent.policy.rules import Clears, Recurs, RuleKind
from nodeagent.policy.validation import BadPolicy

TABLE = Path(kernel_lines.__file__).with_suffix(".toml").read_text()
GOOD: dict[str, object] = {
    "name": "disk_sad", "has": "is sad", "pattern": r"disk (?P<device>\w+) is sad(?: since (?P<day>\w+))?",
    "entity": "disk/{device}", "level": "degraded", "action": "none", "clears": "time", "hold_s": 60,
    "what": "a disk is sad", "source": "ours", "example": "disk sda is sad since Monday",
}  # fmt: skip
WELL: dict[str, object] = {
    "name": "disk_well", "has": "is well", "pattern": r"disk (?P<device>\w+) is well",
    "entity": "disk/{device}", "ends": "disk_sad",
    "what": "a disk is well", "source": "ours", "example": "disk sda is well",
}  # fmt: skip
FINE = {**WELL, "name": "fine", "has": "fine", "pattern": r"(?P<device>\w+) fine", "example": "a fine"}
MAD = {**GOOD, "name": "mad", "has": "mad", "pattern": r"(?P<device>\w+) mad", "example": "a mad"}
NEEDED = sorted(GOOD)
RECURS: dict[str, object] = {
    "recurs_bursts": 2, "recurs_within_s": 600, "recurs_level": "unhealthy", "recurs_action": "replace",
}  # fmt: skip


def toml(*tables: dict[str, object]) -> str:
    return "\n".join(
        "[[line]]\n" + "\n".join(f"{k} = {_value(v)}" for k, v in each.items()) for each in tables
    )


def _value(value: object) -> str:
    return f"'{value}'" if isinstance(value, str) else str(value)


def mistakes(*tables: dict[str, object], after: str = "") -> list[str]:
    with pytest.raises(BadPolicy) as told:
        load_lines(toml(*tables) + after)
    return [each.removeprefix("kernel_lines.toml: ") for each in told.value.messages]


def test_the_shipped_table_is_valid_and_each_line_has_a_rule() -> None:
    lines = load_lines(TABLE)
    made = line_rules(lines)
    assert set(made) == {f"kernel_{line.name}" for line in lines if not line.ends}
    assert all(rule.kind is RuleKind.EVENT and rule.meaning and rule.source for rule in made.values())


def test_no_shipped_line_takes_a_node_out_for_an_action_of_a_job() -> None:
    levels = {line.name: line.level for line in load_lines(TABLE)}
    assert levels["oom_cgroup"] == levels["oom_cgroup_detail"] == levels["nccl_segfault"] == Level.HEALTHY
    assert levels["oom"] == levels["file_max"] == Level.DEGRADED


def test_a_line_has_the_level_and_action_of_the_table() -> None:
    [line] = load_lines(toml(GOOD))
    match = line.pattern.match(line.example)
    assert match is not None
    assert (line.check, line.of(match), line.facts(match)) == (
        "kernel_disk_sad",
        "disk/sda",
        (("day", "Monday"),),
    )
    [rule] = line_rules((line,)).values()
    assert rule.meaning is not None
    assert (rule.meaning.name, rule.meaning.level, rule.meaning.action) == (
        "a disk is sad", Level.DEGRADED, Action.NONE,
    )  # fmt: skip
    assert (rule.meaning.clears, rule.meaning.hold_s) == (Clears.TIME, 60.0)


def test_a_line_that_recurs_has_the_consequence_of_the_table() -> None:
    [rule] = line_rules(load_lines(toml({**GOOD, **RECURS}))).values()
    assert rule.meaning is not None
    assert rule.meaning.recurs == Recurs(2, 600.0, Level.UNHEALTHY, Action.REPLACE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"recurs_bursts": 2}, "recurs_within_s, recurs_level, recurs_action must be set with recurs_bursts"),
        ({**RECURS, "recurs_bursts": 1}, "recurs_bursts = 1: expected 2 or more"),
        ({**RECURS, "recurs_action": "pray"}, "recurs_action = 'pray': expected none, restart_app"),
        ({**RECURS, "recurs_level": "healthy"}, "recurs_action: healthy, replace is no more than degraded"),
    ],
)
def test_a_recurrence_with_mistakes_is_refused(change: dict[str, object], message: str) -> None:
    assert any(each.startswith(f"disk_sad: {message}") for each in mistakes({**GOOD, **change}))


def test_a_line_that_only_ends_findings_has_no_rule() -> None:
    lines = load_lines(toml(GOOD, WELL))
    assert [line.ends for line in lines] == ["", "disk_sad"]
    assert set(line_rules(lines)) == {"kernel_disk_sad"}


def test_a_file_without_lines_is_refused() -> None:
    assert load_lines("") == ()


@pytest.mark.parametrize("key", NEEDED)
def test_no_required_field_may_be_missing(key: str) -> None:
    assert f"{key}: missing" in "\n".join(mistakes({k: v for k, v in GOOD.items() if k != key}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lvl": "x"}, "disk_sad: lvl: unknown key; did you mean level?"),
        ({"zzz": 1}, "disk_sad: zzz: unknown key"),
        ({"level": "bad"}, "disk_sad: level: 'bad'; expected one of healthy, degraded, unhealthy"),
        ({"action": "pray"}, "disk_sad: action: 'pray'; expected one of none, restart_app, reset_gpu"),
        ({"clears": "replaced"}, "disk_sad: clears: 'replaced'; expected one of time, reset, boot"),
        ({"hold_s": -1}, "disk_sad: hold_s: expected a number of seconds"),
        ({"hold_s": "true"}, "disk_sad: hold_s: expected a number of seconds"),
        ({"pattern": "("}, "disk_sad: pattern: missing )"),
        ({"pattern": "x" * 500}, "disk_sad: pattern: 500 characters; expected at most 400"),
        ({"pattern": "disk"}, "disk_sad: entity: no group 'device' in the pattern"),
        (
            {"entity": "cloud/{device}"},
            "disk_sad: entity: 'cloud/{device}'; expected one of gpu, driver, node",
        ),
        ({"example": "it is sad"}, "disk_sad: example: does not match the pattern"),
        (
            {"pattern": r"(?P<device>.+)\[\d+\]: is sad", "example": "a[1]: is sad"},
            "disk_sad: level: must be healthy, because a user can produce a line like the example",
        ),
        ({"has": "is glad"}, "disk_sad: has: does not occur in the example"),
        ({"has": ""}, "disk_sad: has: must be non-empty text"),
        ({"name": 3}, "3: name: must be non-empty text"),
        ({"name": "Disk!"}, "Disk!: name: expected lower-case letters, digits and _"),
    ],
)
def test_each_mistake_is_named(change: dict[str, object], message: str) -> None:
    assert any(each.startswith(message) for each in mistakes({**GOOD, **change}))


def test_all_mistakes_are_reported_at_once() -> None:
    found = mistakes({**GOOD, "level": "bad", "hold_s": -1}, {**WELL, "name": "other", "has": "is ill"})
    assert len(found) == 3


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ((GOOD, {**GOOD, "example": "disk sdb is sad"}), "disk_sad: more than one line has this name"),
        ((GOOD, {**GOOD, "name": "sadder"}), "sadder: its example already matches disk_sad"),
        ((GOOD, {**WELL, "ends": "nothing"}), "disk_well: ends: 'nothing' is not a line"),
        ((GOOD, WELL, {**FINE, "ends": "disk_well"}), "fine: ends: 'disk_well' is not a line"),
        ((GOOD, {**WELL, "entity": "disk/a"}), "disk_well: entity: must be 'disk/{device}'"),
        ((GOOD, WELL, MAD), "disk_well: entity: it would also clear mad"),
        ([GOOD] * (MAX_LINES + 1), f"{MAX_LINES + 1} lines; expected at most {MAX_LINES}"),
    ],
)  # fmt: skip
def test_mistakes_between_lines_are_reported(tables: tuple[dict[str, object], ...], message: str) -> None:
    assert any(each.startswith(message) for each in mistakes(*tables))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("line = 3", "line: must be"),
        ("line = [3]", "line: must be"),
        ("[[lines]]", "lines: unknown key"),
        ("= 3", "at line 1"),
    ],
)
def test_a_file_of_another_shape_is_refused(text: str, message: str) -> None:
    with pytest.raises(BadPolicy, match=message):
        load_lines(text)


def test_the_entity_of_a_line_is_bounded_and_has_only_safe_characters() -> None:
    [line] = load_lines(toml({**GOOD, "pattern": "disk (?P<device>.+) is sad"}))
    match = line.pattern.match(f"disk a b'\"{'x' * 500} is sad")
    assert match is not None
    assert line.of(match).startswith("disk/a_b_xxx")
    assert len(line.of(match)) == 128


@given(
    st.dictionaries(
        st.sampled_from([*NEEDED, "ends"]), st.sampled_from(["", "(", "node", "x", "{"]) | st.integers()
    )
)
def test_no_table_raises_any_other_exception(change: dict[str, object]) -> None:
    with suppress(BadPolicy):
        assert len(load_lines(toml({**GOOD, **change}))) == 1

from __future__ import annotations

import csv
from dataclasses import replace

import pytest

from nodeagent.model import Action, Level
from nodeagent.policy import loading, tables
from nodeagent.policy.loading import FOLDER, shipped
from nodeagent.policy.meanings import ACTIONS, LEVELS
from nodeagent.policy.rules import Clears, Recurs
from nodeagent.policy.validation import BadPolicy

POLICY = shipped()
DAY_S = 86400.0


def rows(name: str) -> list[dict[str, str]]:
    return list(csv.DictReader((FOLDER / name).read_text().splitlines()))


def test_every_row_of_the_xid_table_has_an_action_and_is_used() -> None:
    for row in rows("xid.csv"):
        found = POLICY.unknown_xid if row["xid"] == "*" else POLICY.xids[int(row["xid"])]
        assert (found.level, found.action) == (LEVELS[row["level"]], ACTIONS[row["action"]]), row["xid"]
        assert found.name
        assert found.source
    assert len(POLICY.xids) == len(rows("xid.csv")) - 1 == 179


def test_faults_that_need_a_repair_are_unhealthy_and_end_with_it() -> None:
    ends = {
        Action.RESET_GPU: Clears.RESET,
        Action.REBOOT_NODE: Clears.BOOT,
        Action.REPLACE: Clears.REPLACED,
    }
    for code, found in POLICY.xids.items():
        if found.action in ends:
            assert (found.level, found.clears) == (Level.UNHEALTHY, ends[found.action]), code


def test_a_recurrence_is_never_milder_than_the_first_occurrence() -> None:
    for code, found in POLICY.xids.items():
        if found.recurs is not None:
            assert (found.recurs.level, found.recurs.action) > (found.level, found.action), code


@pytest.mark.parametrize(
    ("code", "level", "action", "clears", "since"),
    [
        (13, Level.HEALTHY, Action.RESTART_APP, Clears.TIME, None),
        (45, Level.HEALTHY, Action.NONE, Clears.TIME, None),
        (48, Level.UNHEALTHY, Action.RESET_GPU, Clears.RESET, 565),
        (63, Level.HEALTHY, Action.NONE, Clears.TIME, 565),
        (64, Level.UNHEALTHY, Action.RESET_GPU, Clears.RESET, 565),
        (79, Level.UNHEALTHY, Action.REBOOT_NODE, Clears.BOOT, 565),
        (94, Level.DEGRADED, Action.RESTART_APP, Clears.RESET, 565),
        (95, Level.UNHEALTHY, Action.RESET_GPU, Clears.RESET, 565),
        (109, Level.UNHEALTHY, Action.RESET_GPU, Clears.RESET, 570),
        (119, Level.UNHEALTHY, Action.RESET_GPU, Clears.RESET, None),
        (143, Level.UNHEALTHY, Action.RESET_GPU, Clears.RESET, 575),
        (145, Level.DEGRADED, Action.NONE, Clears.RESET, 565),
        (158, Level.UNHEALTHY, Action.RESET_GPU, Clears.RESET, 565),
        (167, Level.UNHEALTHY, Action.REBOOT_NODE, Clears.BOOT, None),
        (175, Level.HEALTHY, Action.NONE, Clears.TIME, 565),
    ],
)
def test_the_important_codes_have_the_meaning_that_nvidia_documents(
    code: int, level: Level, action: Action, clears: Clears, since: int | None
) -> None:
    found = POLICY.xids[code]
    assert (found.level, found.action, found.clears, found.verdict_since) == (level, action, clears, since)


@pytest.mark.parametrize(
    ("code", "recurs"),
    [
        (13, None),
        (31, None),
        (39, Recurs(5, DAY_S, Level.DEGRADED, Action.CONTACT_SUPPORT)),
        (62, Recurs(5, DAY_S, Level.UNHEALTHY, Action.CONTACT_SUPPORT)),
        (64, Recurs(2, 7 * DAY_S, Level.UNHEALTHY, Action.REPLACE)),
        (79, Recurs(2, 7 * DAY_S, Level.UNHEALTHY, Action.REPLACE)),
        (120, Recurs(2, DAY_S, Level.UNHEALTHY, Action.REBOOT_NODE)),
        (140, Recurs(2, 7 * DAY_S, Level.UNHEALTHY, Action.REPLACE)),
        (43, None),
    ],
)
def test_a_recurrence_is_more_severe(code: int, recurs: Recurs | None) -> None:
    assert POLICY.xids[code].recurs == recurs


def test_retired_codes_go_to_support_and_cost_no_work() -> None:
    for found in (POLICY.xids[1], POLICY.xids[91]):
        assert (found.level, found.action, found.hold_s) == (Level.DEGRADED, Action.CONTACT_SUPPORT, DAY_S)


@pytest.mark.parametrize("code", sorted(POLICY.xids))
def test_an_unknown_code_is_judged_no_harder_than_this_one(code: int) -> None:
    known, unknown = POLICY.xids[code], POLICY.unknown_xid
    assert (unknown.level, unknown.action) <= (known.level, known.action)
    assert unknown.hold_s <= known.hold_s
    assert unknown.recurs is not None
    if known.recurs is not None:
        assert (unknown.recurs.level, unknown.recurs.action) <= (known.recurs.level, known.recurs.action)
        assert unknown.recurs.bursts / unknown.recurs.within_s >= known.recurs.bursts / known.recurs.within_s


def test_an_unknown_sxid_is_judged_no_harder_than_any_known_one() -> None:
    unknown = POLICY.unknown_sxid
    for code, known in POLICY.sxids.items():
        assert (unknown.level, unknown.action) <= (known.level, known.action), code
        assert unknown.hold_s <= known.hold_s, code


@pytest.mark.parametrize("code", [175, 176, 177, 178, 185])
def test_a_code_without_a_documented_action_is_judged_as_an_unknown_one(code: int) -> None:
    known = POLICY.xids[code]
    assert "no action is documented" in POLICY.notes[f"xid.{code}"]
    assert replace(known, name="", source="") == replace(POLICY.unknown_xid, name="", source="")


A100, H100 = "NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize("code", [64, 95])
def test_an_a100_needs_a_reboot_where_other_gpus_need_a_reset(code: int) -> None:
    assert POLICY.for_gpu(H100) is POLICY
    here, elsewhere = POLICY.for_gpu(A100).xids[code], POLICY.xids[code]
    assert (here.level, here.action, here.clears) == (Level.UNHEALTHY, Action.REBOOT_NODE, Clears.BOOT)
    assert elsewhere.action is Action.RESET_GPU
    assert (here.name, here.verdict_since, here.recurs) == (
        elsewhere.name, elsewhere.verdict_since, elsewhere.recurs,
    )  # fmt: skip
    assert POLICY.for_gpu(A100).xids[79] is POLICY.xids[79]


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("NVIDIA A100-SXM4-80GB", True),
        ("NVIDIA A100 80GB PCIe", True),
        ("GRID A100-10C", True),
        ("NVIDIA A100X", True),
        ("A100", True),
        ("NVIDIA RTX A1000", False),
        ("NVIDIA RTX A1000 6GB Laptop GPU", False),
        ("NVIDIA XA100", False),
        ("", False),
    ],
)
def test_an_a100_is_known_by_its_name_and_not_by_a_part_of_another(name: str, is_one: bool) -> None:
    assert (POLICY.for_gpu(name) is not POLICY) is is_one


def test_with_mig_an_a100_needs_only_a_reset_after_an_error_that_was_not_contained() -> None:
    assert POLICY.for_gpu(A100, mig=True).xids[95] is POLICY.xids[95]
    assert POLICY.for_gpu(A100, mig=True).xids[64] == POLICY.for_gpu(A100).xids[64]


def test_an_operators_meaning_takes_precedence_over_the_models() -> None:
    own = loading.load('[xid.95]\naction = "contact_support"\n').for_gpu(A100)
    assert own.xids[95].action is Action.CONTACT_SUPPORT
    assert own.xids[64].action is Action.REBOOT_NODE


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ("999,A100,x,unhealthy,reboot_node,boot,600,ours", "a code of xid.csv, once for each model"),
        ("95,,x,unhealthy,reboot_node,boot,600,ours", "model: is missing"),
        ("95,A100,x,unhealthy,reboot,boot,600,ours", "action = 'reboot'"),
        ("95,A100,x,unhealthy,none,boot,600,ours\n95,A100,x,unhealthy,none,boot,600,ours", "once for each"),
        ("95,A100,x,unhealthy,reboot_node,boot,600,ours,on", "mig = 'on': expected off"),
    ],
)
def test_a_row_for_a_model_with_a_mistake_is_refused(row: str, told: str) -> None:
    head = "xid,model,name,level,action,clears,hold_s,source,mig\n"
    with pytest.raises(BadPolicy, match=told):
        tables.read_models(f"{head}{row}\n", POLICY.xids)


def test_a_single_sxid_takes_precedence_over_the_range_that_contains_it() -> None:
    assert POLICY.sxids[12020].level is Level.UNHEALTHY
    assert POLICY.sxids[12021].level is Level.DEGRADED
    assert all(POLICY.sxids[code].level is Level.UNHEALTHY for code in (22003, 22011, *range(23001, 23018)))
    assert 23018 not in POLICY.sxids


def test_every_row_of_every_table_names_its_source() -> None:
    for name in loading.FILES:
        if name.endswith(".csv"):
            assert all(row["source"] for row in rows(name)), name


def test_the_version_identifies_the_tables_and_the_operators_file() -> None:
    plain = loading.load()
    one, other = loading.load('[xid.79]\naction = "replace"'), loading.load("")
    assert plain.version.startswith(f"{loading.FACTS_OF}.")
    assert {each.version.partition("+")[0] for each in (one, other)} == {plain.version}
    assert len({plain.version, one.version, other.version}) == 3


HEAD = "xid,name,class,level,action,clears,hold_s,source\n"
REST = "*,other,x,degraded,none,time,60,ours\n"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (HEAD + "79,bus,hw,unhealthy,reboot,boot,60,NV\n" + REST, ["action = 'reboot'", "reboot_node?"]),
        (HEAD + "79,bus,hw,unhealthy,none,boot,soon,NV\n" + REST, ["hold_s = 'soon'"]),
        (HEAD + "79,bus,hw,unhealthy,none,boot,60,\n" + REST, ["source is missing"]),
        (
            HEAD + "79,bus,hw,healthy,reset_gpu,reset,60,NV\n" + REST,
            ["reset_gpu does not fit the level healthy"],
        ),
        (HEAD + "79,bus,hw,degraded,none,boot,60,NV\n" * 2 + REST, ["line-3", "a code, once"]),
        (HEAD, ["0 rows for all other codes"]),
    ],
)
def test_a_table_with_a_mistake_is_refused(text: str, told: list[str]) -> None:
    with pytest.raises(BadPolicy) as refused:
        tables.read_xids(text)
    assert all(each in str(refused.value) for each in told), str(refused.value)


def test_a_row_with_a_mask_of_another_width_is_refused() -> None:
    text = (FOLDER / "nvlink5.csv").read_text().replace("------000000------", "-----000000------", 1)
    with pytest.raises(BadPolicy, match="line-2: cannot be read: 32 of 0, 1 and -"):
        tables.read_nvlink5(text)


def test_a_repeated_bit_is_refused() -> None:
    text = (FOLDER / "nvlink4_bits.csv").read_text().replace("1,23,", "1,0,", 1)
    with pytest.raises(BadPolicy, match="a bit from 0 to 31, once"):
        tables.read_nvlink4(text)

"""The meaning of one event in the policy, depending on the content of its line."""

from __future__ import annotations

import csv
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.model import Action, Level
from nodeagent.policy import loading, nvlink
from nodeagent.policy.loading import FOLDER, shipped
from nodeagent.policy.meanings import ACTIONS, LEVELS
from nodeagent.policy.rules import Recurs

POLICY = shipped()
OLD, NEW = 570, 575
NOTHING = (Level.HEALTHY, Action.NONE)
RESET = (Level.UNHEALTHY, Action.RESET_GPU)
UNDECIDED = (Level.DEGRADED, Action.NONE)

with (FOLDER / "nvlink5.csv").open() as file:
    ROWS = [row for row in csv.DictReader(file) if row["units"] != "*"]


def said(code: int, variant: str, branch: int | None = None, check: str = "xid") -> tuple[Level, Action]:
    found = POLICY.meaning(check, code, variant, branch)
    return found.level, found.action


def info_for(mask: str, free: str) -> int:
    """Return an intrInfo that fits `mask`, with `free` where it does not matter."""
    return int(mask.replace("-", free), 2)


def report(row: dict[str, str], mask: str, free: str, unit: int = 0, word: str = "") -> str:
    units, statuses = row["units"].split("/"), row["error_status"].split("/")
    word = word or ("Nonfatal" if row["severity"].startswith("non") else "Fatal")
    return f"{units[unit]} {word} 0x{info_for(mask, free):08x} 0x{int(statuses[0] or '0', 16):08x}"


def _is(row: dict[str, str], pattern: nvlink.NvlinkPattern) -> bool:
    masks = (nvlink.parse_mask(row["mask_lt_575"]), nvlink.parse_mask(row["mask_ge_575"]))
    return (pattern.before, pattern.since) == masks


def test_every_row_of_nvlink_5_decodes_to_itself_in_both_layouts() -> None:
    assert len(ROWS) == 95
    for row in ROWS:
        expected = (LEVELS[row["level"]], ACTIONS[row["action"]])
        # The word contradicts the row on purpose, so that the result shows which of them was used.
        word = "Fatal" if expected[0] is Level.HEALTHY else "Nonfatal"
        for branch, mask in ((OLD, row["mask_lt_575"]), (NEW, row["mask_ge_575"])):
            for unit in (0, -1):
                for free in "01":
                    told = report(row, mask, free, unit, word)
                    assert said(int(row["xid"]), told, branch) == expected, (row, told)
                    seen = nvlink.parse_report(told)
                    assert seen is not None
                    fitting = nvlink.matching_rows(POLICY.nvlink5_rows, int(row["xid"]), seen, branch)
                    assert any(_is(row, each) for each in fitting), (row, fitting)


def test_every_row_names_its_unit_and_advice() -> None:
    for row in ROWS:
        found = POLICY.meaning("xid", int(row["xid"]), report(row, row["mask_ge_575"], "0"), NEW)
        assert row["units"].split("/")[0] in found.name
        assert found.verdict_since == 565, "the driver's verdict also takes precedence over a decoded row"


def test_an_unknown_branch_tries_both_layouts_and_uses_the_worse_meaning() -> None:
    for row in ROWS:
        expected = (LEVELS[row["level"]], ACTIONS[row["action"]])
        for mask in (row["mask_lt_575"], row["mask_ge_575"]):
            assert said(int(row["xid"]), report(row, mask, "0"), None) >= expected, row


def test_an_error_that_the_driver_has_promoted_to_fatal_is_fatal() -> None:
    promoted = [row for row in ROWS if row["second_action"]]
    assert len(promoted) == 3
    for row in promoted:
        for branch, mask in ((OLD, "second_mask_lt_575"), (NEW, "second_mask_ge_575")):
            found = POLICY.meaning("xid", 145, report(row, row[mask], "0"), branch)
            assert (found.level, found.action) == RESET
            assert found.recurs is not None
            assert found.recurs.level is Level.UNHEALTHY


@pytest.mark.parametrize(
    ("variant", "expected"),
    [
        ("SAW_MVB Fatal 0x00000001 0x00000040", RESET),  # a status that the table does not have
        ("SAW_MVB Nonfatal 0x00000001 0x00000040", NOTHING),
        ("SAW_MVB Fatal 0x00000002 0x00000001", RESET),  # another unit's number
        ("OTHER Fatal 0x00000001 0x00000001", RESET),
        ("OTHER Nonfatal 0x00000001 0x00000001", NOTHING),
        ("saw_mvb nonfatal 0x1 0x2", RESET),  # case and leading zeros do not matter
        ("SAW_MVB Fatal", UNDECIDED),
        ("nonsense", UNDECIDED),
        ("", UNDECIDED),
    ],
)
def test_an_unknown_combination_is_judged_by_its_severity(
    variant: str, expected: tuple[Level, Action]
) -> None:
    assert said(144, variant, NEW) == expected


def test_the_layout_changes_at_r575() -> None:
    in_the_new_layout_only = "SAW_MVB Nonfatal 0x00000001 0x00000002"
    assert said(144, in_the_new_layout_only, NEW) == RESET
    assert said(144, in_the_new_layout_only, OLD) == NOTHING, "no row fits, so the driver's word counts"
    assert said(144, in_the_new_layout_only, None) == RESET


def registers(**bits: int) -> str:
    values = [bits.get(f"r{number}", 0) for number in range(1, nvlink.REGISTER_COUNT + 1)]
    return ",".join(f"0x{value:08x}" for value in values)


@pytest.mark.parametrize(
    ("variant", "expected"),
    [
        (registers(r1=1 << 0 | 1 << 23 | 1 << 30), NOTHING),
        (registers(r1=1 << 1 | 1 << 20), NOTHING),
        (registers(r1=1 << 4), RESET),
        (registers(r1=1 << 0 | 1 << 28), RESET),  # the worst bit counts
        (registers(r1=1 << 2), UNDECIDED),  # a bit that the table does not have
        (registers(r1=1 << 0 | 1 << 2), UNDECIDED),
        (registers(r3=1 << 13), (Level.DEGRADED, Action.CONTACT_SUPPORT)),
        (registers(r4=1 << 18), RESET),
        (registers(r5=1 << 20), NOTHING),
        (registers(r2=1 << 4, r6=1, r7=1), UNDECIDED),  # registers that cannot be read
        (registers(), UNDECIDED),
        ("0x10,0x0", UNDECIDED),
        ("", UNDECIDED),
    ],
)
def test_the_registers_of_xid_74_determine_its_severity(variant: str, expected: tuple[Level, Action]) -> None:
    assert said(74, variant) == expected
    assert POLICY.meaning("xid", 74, variant).verdict_since == 565


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("none", NOTHING),
        ("reset_gpu", RESET),
        ("drain_and_reset", RESET),
        ("drain_p2p", (Level.DEGRADED, Action.RESET_GPU)),
        ("reboot_node", (Level.UNHEALTHY, Action.REBOOT_NODE)),
        ("something_new", NOTHING),
    ],
)
def test_xid_154_has_the_meaning_that_its_verdict_names(word: str, expected: tuple[Level, Action]) -> None:
    assert said(154, word) == expected


def test_exceptions_at_an_unknown_location_do_not_count_as_a_repetition() -> None:
    again = Recurs(3, 86400.0, Level.DEGRADED, Action.CONTACT_SUPPORT, same_variant=True)
    policy = replace(POLICY, xids={13: replace(POLICY.xids[13], recurs=again)})  # as an operator might set it
    assert policy.meaning("xid", 13, "").recurs is policy.meaning("xid", 13).recurs is None
    assert policy.meaning("xid", 13, "GPC 1 TPC 2").recurs == again


def test_faults_of_applications_never_degrade_a_gpu_however_often_they_occur() -> None:
    faults = [code for code, kind in POLICY.classes.items() if kind == "application"]
    assert {13, 31, 43} <= set(faults)
    for code in faults:
        meaning = POLICY.xids[code]
        assert (meaning.level, meaning.recurs) == (Level.HEALTHY, None), code


@pytest.mark.parametrize(
    ("code", "word", "expected"),
    [
        (12020, "", (Level.UNHEALTHY, Action.REBOOT_NODE)),
        (12020, "non-fatal", (Level.UNHEALTHY, Action.REBOOT_NODE)),  # always fatal
        (12001, "", (Level.DEGRADED, Action.CONTACT_SUPPORT)),
        (12001, "fatal", (Level.UNHEALTHY, Action.REBOOT_NODE)),
        (12001, "non-fatal", UNDECIDED),
        (99, "", UNDECIDED),
        (99, "fatal", (Level.UNHEALTHY, Action.REBOOT_NODE)),
    ],
)
def test_an_sxid_is_as_severe_as_its_code_and_its_severity(
    code: int, word: str, expected: tuple[Level, Action]
) -> None:
    assert said(code, word, check="sxid") == expected


def test_single_meaning_events_and_kernel_lines_are_found_by_their_check() -> None:
    assert said(0, "", check="poison_fatal") == RESET
    assert POLICY.meaning("kernel_oom", 0).source
    for check in ("ecc_sbe", "no_such_check"):
        with pytest.raises(KeyError) as caught:
            POLICY.meaning(check, 0)
        assert caught.value.args == (check,)


def test_an_unknown_severity_leaves_a_code_with_its_own_meaning() -> None:
    without = replace(POLICY, words={})
    for code, variant in ((144, "OTHER Fatal 0x1 0x1"), (154, "reset_gpu")):
        assert without.meaning("xid", code, variant) == POLICY.xids[code]
    assert without.meaning("sxid", 99, "fatal") == POLICY.unknown_sxid


def test_an_operators_setting_for_a_decoded_code_applies_to_all_its_lines() -> None:
    mine = loading.load('[xid.145]\nlevel = "degraded"\naction = "contact_support"')
    for row in ROWS:
        if row["xid"] == "145":
            found = mine.meaning("xid", 145, report(row, row["mask_ge_575"], "0"), NEW)
            assert (found.level, found.action) == (Level.DEGRADED, Action.CONTACT_SUPPORT)
            assert found.overridden


@given(code=st.integers(-1, 200), variant=st.text(max_size=40), branch=st.none() | st.integers(0, 700))
def test_any_event_has_a_meaning(code: int, variant: str, branch: int | None) -> None:
    assert POLICY.meaning("xid", code, variant, branch).name
    assert POLICY.meaning("sxid", code, variant, branch).name


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.sampled_from((OLD, NEW, None)))
def test_a_fatal_report_is_healthy_only_if_a_row_ignores_it(
    info: int, status: int, branch: int | None
) -> None:
    for code in nvlink.NVLINK5_XIDS:
        level, action = said(code, f"UNIT Fatal 0x{info:08x} 0x{status:08x}", branch)
        assert (level, action) == RESET

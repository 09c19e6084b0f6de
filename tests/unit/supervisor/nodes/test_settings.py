from __future__ import annotations

import re
from dataclasses import fields

import pytest

from supervisor.nodes.settings import DRY_RUN_S, KEYS, BadSettings, QuarantineSettings, key_of, parse
from supervisor.quarantine.model import NodePolicy
from tests.unit.literals import ROOT

PAGE = ROOT / "docs" / "quarantine.md"


def test_without_settings_the_policy_has_its_defaults_and_the_first_hour_is_dry() -> None:
    assert parse({}) == QuarantineSettings(NodePolicy(), "first-hour", False)


def test_every_field_of_the_policy_can_be_set() -> None:
    names = {key_of(each.name) for each in fields(NodePolicy)}
    assert names == {*KEYS} - {"dry-run", "drain-others"}
    found = parse(
        {
            "confirm": "30s", "max-share": "0.2", "min-out": "2", "unremedied": "2", "prefer-away": "true",
            "drain-for": "replace, reboot_node", "waiver": "2d", "dry-run": "false", "drain-others": "true",
            "storm-share": "0",
        }
    )  # fmt: skip
    assert found == QuarantineSettings(
        NodePolicy(
            confirm_s=30.0, max_share=0.2, min_out=2, unremedied=2.0, prefer_away=True,
            drain_for=frozenset({"replace", "reboot_node"}), waiver_s=2 * 86400.0, storm_share=0.0,
        ),
        "false",
        True,
    )  # fmt: skip
    assert parse({"drain-for": ""}).policy.drain_for == frozenset()
    assert parse({"prefer-away": "false"}).policy.prefer_away is False


@pytest.mark.parametrize(
    ("data", "problems"),
    [
        ({"confrim": "5s"}, ["confrim: unknown setting: did you mean 'confirm'?"]),
        ({"confirm_s": "5s"}, ["confirm_s: unknown setting: did you mean 'confirm'?"]),
        ({"dry-run": "flase"}, [
            "dry-run: invalid value 'flase': did you mean 'false'? expected true, false or first-hour"
        ]),
        ({"max-share": "2"}, ["max-share: invalid value '2': expected 0-1"]),
        ({"stale": "soon", "min-out": "-1"}, [
            "min-out: invalid value '-1': expected 0-100000",
            "stale: invalid value 'soon': expected a time of 1ms-1y, such as 30s or 5m",
        ]),
        ({"drain-for": "reboot"}, [
            "drain-for: invalid value 'reboot': did you mean 'reboot_node'? expected some of none,"
            " restart_app, contact_support, reset_gpu, reboot_node, replace, separated by commas"
        ]),
        ({"clean": "1s"}, ["clean_s: expected at least storm_window_s plus cooldown_s"]),
    ],
)  # fmt: skip
def test_all_mistakes_are_reported_with_what_is_expected(data: dict[str, str], problems: list[str]) -> None:
    with pytest.raises(BadSettings) as error:
        parse(data)
    assert list(error.value.problems) == problems


def test_the_dry_run_lasts_for_the_first_hour_of_the_installation() -> None:
    first = QuarantineSettings()
    assert first.is_dry(None, 5.0)
    assert first.is_dry(100.0, 100.0 + DRY_RUN_S - 1)
    assert not first.is_dry(100.0, 100.0 + DRY_RUN_S)
    assert first.is_dry(100.0, 50.0), "a clock that is behind does not end it"
    assert QuarantineSettings(dry_run="true").is_dry(0.0, 1e9)
    assert not QuarantineSettings(dry_run="false").is_dry(None, 0.0)


def test_the_documentation_lists_every_setting_with_its_default() -> None:
    rows = re.findall(r"^\| `([a-z-]+)` \| ([^|]+) \| [^|]+ \|$", PAGE.read_text(), re.MULTILINE)
    data = {key: default for key, default in rows if key in KEYS}
    assert data.keys() == KEYS.keys()
    assert parse(data) == QuarantineSettings()

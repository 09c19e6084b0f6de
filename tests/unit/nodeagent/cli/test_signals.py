from __future__ import annotations

from pathlib import Path

from nodeagent.cli.privileges import NEEDS
from nodeagent.cli.signals import page, sensors_of
from nodeagent.policy.kernel_lines import KERNEL
from nodeagent.policy.loading import load, shipped

POLICY = shipped()
PAGE = page(POLICY)
DOCUMENT = Path(__file__).parents[4] / "docs" / "signals.md"


def test_the_page_in_docs_equals_the_generated_one() -> None:
    again = "python -m nodeagent.cli.signals > docs/signals.md"
    assert DOCUMENT.read_text() == PAGE, f"docs/signals.md is stale; print it again: {again}"


def test_every_check_line_xid_and_word_has_its_own_row() -> None:
    for name in POLICY.rules:
        assert PAGE.count(f"\n| `{name.removeprefix(KERNEL)}` |") >= 1, name
    for code in POLICY.xids:
        assert PAGE.count(f"\n| {code} | ") == 1, code
    for _, said in POLICY.words:
        assert f"| {said} |" in PAGE or f"| any, called {said} |" in PAGE or said in ("fatal", "nonfatal")


def test_a_row_has_the_text_of_explain() -> None:
    assert (
        "| `gpu_temperature_margin` | degrees below the slowdown temperature | nvml-polling | 15 s | "
        "5 °C or less, in 3 of 4 samples -> none | 0 °C or less, for 1 min -> contact_support | "
        "after 2 min above 10 |"
    ) in PAGE
    assert "| `ib_port` | InfiniBand port | sysfs | 5 s | slow for 1 min -> none; unused for 4 min" in PAGE
    assert "| 79 | GPU dropped off the PCIe bus | unhealthy -> reboot_node | a reboot, then 10 min" in PAGE


def test_codes_between_two_groups_belong_to_neither() -> None:
    assert "| 11000 to 11099 |" in PAGE
    assert "| 12020 | NVSwitch error that is always fatal |" in PAGE


def test_every_row_has_the_columns_of_its_table() -> None:
    columns = 0
    for line in PAGE.splitlines():
        if not line.startswith("| "):
            columns = 0
            continue
        columns = columns or line.count(" | ")
        assert line.count(" | ") == columns, line


def test_every_check_is_seen_by_a_sensor_and_every_privilege_belongs_to_a_sensor_of_the_check() -> None:
    for name in POLICY.rules:
        assert sensors_of(name), name
    assert sensors_of("no_such_check") == ()
    for need in NEEDS:
        for check in need.checks:
            assert need.sensor in sensors_of(check)


def test_the_page_shows_an_operators_changes() -> None:
    changed = page(load("[checks.ecc_sbe]\ndegraded.at = 70"))
    assert "more than 70 errors in 1 min" in changed

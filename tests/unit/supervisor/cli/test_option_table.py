from __future__ import annotations

import pytest

from supervisor.cli import option_table
from supervisor.cli.option_table import Reader

CHECKPOINT = option_table.duration(1, 3600, "none")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30s", 30), ("5m", 300), ("1.5m", 90), ("1h", 3600), ("250ms", None), ("45", 45), ("0", 0),
     ("0s", 0), ("2 min", 120), (".5m", 30), ("61m", None), ("-5s", None), ("5x", None),
     ("", None), ("nan", None), ("1e3", None), ("\u0663s", None)],
)  # fmt: skip
def test_durations_have_units_and_bounds(text: str, seconds: float | None) -> None:
    if seconds is not None:
        assert CHECKPOINT(text) == seconds
        return
    with pytest.raises(ValueError, match="30s or 5m, from 1s to 1h, or 0: none"):
        CHECKPOINT(text)


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (option_table.count(0, 5), "5", 5),
        (option_table.count(0, 5, {"auto": -1}), "auto", -1),
        (option_table.number(1.5, 10, "off"), "0", 0.0),
        (option_table.number(1.5, 10), "2.5", 2.5),
        (option_table.share, "1%", 0.01),
        (option_table.share, "0.5", 0.5),
        (option_table.ranks, "gpu", "gpu"),
        (option_table.ranks, "8", 8),
        (option_table.nodes, "2:2", 2),
    ],
)
def test_a_value_within_its_bounds_is_read(read: Reader, text: str, value: object) -> None:
    assert read(text) == value


@pytest.mark.parametrize(
    ("read", "text", "accepted"),
    [
        (option_table.count(0, 5), "6", "0 to 5"),
        (option_table.count(0, 5), "1.0", "0 to 5"),
        (option_table.count(0, 5, {"auto": -1}), "a", "'auto'"),
        (option_table.count(0, 5), "\u0663", "0 to 5"),
        (option_table.count(0, 5), "9" * 5000, "0 to 5"),
        (option_table.number(1.5, 10, "off"), "1", "or 0: off"),
        (option_table.number(1.5, 10), "nan", "1.5 to 10"),
        (option_table.number(1.5, 10), "inf", "1.5 to 10"),
        (option_table.share, "0", "above 0"),
        (option_table.share, "200%", "up to 1"),
        (option_table.ranks, "all", "auto, cpu or gpu"),
        (option_table.nodes, "2:4", "2 or 4"),
        (option_table.nodes, "2:", "N:N"),
        (option_table.choice("a", "b"), "c", "one of a, b"),
        (option_table.directory, "", "directory"),
        (option_table.directory, "--json", "directory"),
        (option_table.directory, "a\0b", "directory"),
    ],
)
def test_any_other_value_says_what_is_accepted(read: Reader, text: str, accepted: str) -> None:
    with pytest.raises(ValueError, match=accepted):
        read(text)

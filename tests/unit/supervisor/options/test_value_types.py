from __future__ import annotations

import pytest

from supervisor.options import value_types
from supervisor.options.value_types import ValueType

CHECKPOINT = value_types.duration(1, 3600, "none")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30s", 30), ("5m", 300), ("1.5m", 90), ("1h", 3600), ("250ms", None), ("45", 45), ("0", 0),
     ("0s", 0), ("2 min", 120), (".5m", 30), ("61m", None), ("-5s", None), ("5x", None),
     ("", None), ("nan", None), ("1e3", None), ("\u0663s", None)],
)  # fmt: skip
def test_durations_have_units_and_bounds(text: str, seconds: float | None) -> None:
    if seconds is not None:
        assert CHECKPOINT.read(text) == seconds
        return
    with pytest.raises(ValueError, match=r"^a time of 1s-1h, such as 30s or 5m, or 0 for none$"):
        CHECKPOINT.read(text)


@pytest.mark.parametrize(
    ("value_type", "text", "value"),
    [
        (value_types.whole_number(0, 5), "5", 5),
        (value_types.whole_number(0, 5, {"auto": -1}), "auto", -1),
        (value_types.number(1.5, 10, "off"), "0", 0.0),
        (value_types.number(1.5, 10), "2.5", 2.5),
        (value_types.duration(1, 4 * 365 * 86_400), "3y", 3 * 365 * 86_400),
        (value_types.size, "500GB", 5e11),
        (value_types.size, "4TiB", 4.0 * 2**40),
        (value_types.size, "1.5 kB", 1500.0),
        (value_types.size, "2M", 2e6),
        (value_types.size, "1024", 1024.0),
        (value_types.rate, "2GB/s", 2e9),
        (value_types.rate, "500MiB/s", 500.0 * 2**20),
        (value_types.share, "1%", 0.01),
        (value_types.share, "0.5", 0.5),
        (value_types.ranks, "gpu", "gpu"),
        (value_types.ranks, "8", 8),
        (value_types.nodes, "2:2", 2),
        (value_types.job, "research/gpt-0.a", "research/gpt-0.a"),
        (value_types.namespace, "research", "research"),
    ],
)
def test_a_value_within_its_bounds_is_read(value_type: ValueType, text: str, value: object) -> None:
    assert value_type.read(text) == value


@pytest.mark.parametrize(
    ("value_type", "text", "accepted"),
    [
        (value_types.whole_number(0, 5), "6", "0-5"),
        (value_types.whole_number(0, 5), "1.0", "a whole number 0-5"),
        (value_types.whole_number(0, 5, {"auto": -1}), "a", "0-5 or auto"),
        (value_types.whole_number(0, 5), "\u0663", "0-5"),
        (value_types.whole_number(0, 5), "9" * 5000, "0-5"),
        (value_types.number(1.5, 10, "off"), "1", "or 0 for off"),
        (value_types.number(1.5, 10), "nan", "1.5-10"),
        (value_types.number(1.5, 10), "inf", "1.5-10"),
        (value_types.duration(1, 100 * 365 * 86_400), "0.5s", "1s-100y, such as 90d or 50000h"),
        (value_types.size, "0GB", "a size such as"),
        (value_types.size, "5", "a size with its unit, such as 5GB"),
        (value_types.size, "-5GB", "a size such as"),
        (value_types.size, "5iB", "a size such as"),
        (value_types.size, "5GB/s", "a size such as"),
        (value_types.size, "9" * 400, "a size such as"),
        (value_types.size, "", "a size such as"),
        (value_types.rate, "2GB", "a rate such as"),
        (value_types.rate, "/s", "a rate such as"),
        (value_types.share, "0", "above 0"),
        (value_types.share, "200%", "up to 1"),
        (value_types.ranks, "all", "auto, cpu or gpu"),
        (value_types.nodes, "2:4", "one number; for a range, use --members 4 --min-members 2"),
        (value_types.nodes, "2:", "1-4096"),
        (value_types.choice("a", "b"), "c", "a or b"),
        (value_types.job, "GPT", "the name of a job, or NAMESPACE/NAME"),
        (value_types.job, "a/b/c", "NAMESPACE/NAME"),
        (value_types.job, "a.b/c", "NAMESPACE/NAME"),
        (value_types.job, "research/", "NAMESPACE/NAME"),
        (value_types.job, "a" * 254, "NAMESPACE/NAME"),
        (value_types.namespace, "a.b", "namespace"),
        (value_types.context, "--json", "context"),
        (value_types.directory, "", "directory"),
        (value_types.directory, "--json", "directory"),
        (value_types.directory, "a\0b", "directory"),
    ],
)
def test_any_other_value_is_refused_with_the_accepted_ones(
    value_type: ValueType, text: str, accepted: str
) -> None:
    with pytest.raises(ValueError, match=accepted):
        value_type.read(text)

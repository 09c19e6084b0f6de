from __future__ import annotations

import pytest

from supervisor.display import ansi
from supervisor.display.ansi import Style, style_for, width_of


@pytest.mark.parametrize(
    ("terminal", "encoding", "environment", "expected"),
    [
        (True, "utf-8", {}, Style(True, True)),
        (True, "UTF-8", {"NO_COLOR": "1"}, Style(False, True)),
        (True, "utf-8", {"NO_COLOR": ""}, Style(True, True)),
        (True, "utf-8", {"TERM": "dumb"}, Style(False, True)),
        (False, "utf-8", {}, Style(False, True)),
        (True, "ascii", {}, Style(True, False)),
        (True, "latin-1", {}, Style(True, False)),
        (True, None, {}, Style(True, False)),
        (True, "no-such", {}, Style(True, False)),
    ],
)
def test_the_capabilities_of_an_output_are_detected(
    terminal: bool, encoding: str | None, environment: dict[str, str], expected: Style
) -> None:
    assert style_for(terminal=terminal, encoding=encoding, environment=environment) == expected


def test_widths_are_counted_in_terminal_columns() -> None:
    assert width_of("abc") == 3
    assert width_of("\x1b[31mabc\x1b[0m") == 3
    assert width_of("\u6df1\u5733") == 4
    assert width_of("e\u0301") == 1


@pytest.mark.parametrize(("unicode", "more"), [(True, "\u2026"), (False, "...")])
def test_an_overlong_text_is_clipped_with_a_sign(unicode: bool, more: str) -> None:
    chosen = Style(False, unicode)
    assert ansi.clip("0123456789", 10, chosen) == "0123456789"
    assert ansi.clip("0123456789", 8, chosen) == "01234567"[: 8 - len(more)] + more
    assert width_of(ansi.clip("\u6df1\u5733\u6df1\u5733", 5, chosen)) <= 5
    assert ansi.clip("0123456789", 0, chosen) == ""


def test_cells_that_do_not_fit_are_omitted_from_the_end() -> None:
    cells = [("first", ("1",)), ("", ()), ("second", ()), ("third", ())]
    plain = Style()
    assert ansi.join(cells, 100, plain, "  ") == "first  second  third"
    assert ansi.join(cells, 14, plain, "  ") == "first  second"
    assert ansi.join(cells, 3, plain, "  ") == "fir"[:0] + "..."
    assert ansi.join(cells, 6, Style(True, True), "  ") == "\x1b[1mfirst\x1b[0m"

"""Foreign text never moves the cursor."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.protocol.foreign_text import SGR, harmless, lines


@pytest.mark.parametrize(
    ("text", "kept", "plain"),
    [
        ("step 1", "step 1", "step 1"),
        ("\x1b[32mgreen\x1b[0m!", "\x1b[32mgreen\x1b[0m!\x1b[0m", "green!"),
        ("\x1b[2J\x1b[1;1Hboo", "boo", "boo"),
        ("a\tb", "a\tb", "a\tb"),
        ("\x1b]0;a title\x07text", "text", "text"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link", "link"),
        ("\x1b]0;without end", "", ""),
        ("beep\x07 and \x9b2J", "beep and 2J", "beep and 2J"),
        ("\x1bcreset", "reset", "reset"),
        ("caf\u00e9 \U0001f642", "caf\u00e9 \U0001f642", "caf\u00e9 \U0001f642"),
    ],
)
def test_no_output_of_a_rank_moves_the_cursor(text: str, kept: str, plain: str) -> None:
    assert harmless(text, colour=True) == kept
    assert harmless(text, colour=False) == plain


@given(st.text(alphabet="\x1b[];?0159mJHX\x07\\ \x9b\na\u20ac"))
def test_no_text_leaves_a_control_sequence(text: str) -> None:
    plain = harmless(text, colour=False)
    assert "\x1b" not in plain
    assert "\n" not in plain
    coloured = SGR.sub("", harmless(text, colour=True))
    assert "\x1b" not in coloured


def test_only_newlines_separate_lines() -> None:
    assert lines("one\x1b[2J\ntw\ro", colour=True) == ["one", "two"]

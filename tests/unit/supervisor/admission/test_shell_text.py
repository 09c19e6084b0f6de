from __future__ import annotations

import shlex
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor.admission.shell_text import ShellWord, SimpleCommand, UnclearCommand, simple_commands


def words(text: str) -> list[str]:
    (command,) = simple_commands(text)
    return [word.text for word in command.words]


def test_words_lose_their_quotes() -> None:
    assert words(r"""a 'b c' "d \"e\" \x" f\ g 'h'"i"j '' """) == ["a", "b c", 'd "e" \\x', "f g", "hij", ""]


def test_a_continued_line_is_one_line_and_a_comment_is_left_out() -> None:
    assert words("a \\\n  b\\\nc # d 'e\n") == ["a", "bc"]
    assert words("a#b") == ["a#b"]


def test_redirections_are_not_words_and_their_positions_are_known() -> None:
    (command,) = simple_commands("a 2>&1 b >'c d' e&>>f <g >| h")
    assert [word.text for word in command.words] == ["a", "b", "e"]
    assert len(command.redirections) == 5


def test_commands_record_the_operators_around_them() -> None:
    found = simple_commands("\na; b &&\n c || d | e & f\n\n")
    around = [(each.words[0].text, each.before, each.after) for each in found]
    assert around == [
        ("a", "", ";"), ("b", ";", "&&"), ("c", "&&", "||"),
        ("d", "||", "|"), ("e", "|", "&"), ("f", "&", "\n"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("$A", ShellWord("$A", True, True, 0, 2)),
        ('"$A"', ShellWord("$A", True, False, 0, 4)),
        ("'$A'", ShellWord("$A", False, False, 0, 4)),
        (r"\$A", ShellWord("$A", False, False, 0, 3)),
        (r'"\$A"', ShellWord("$A", False, False, 0, 5)),
        ("--n=${A:-1 2}", ShellWord("--n=${A:-1 2}", True, True, 0, 13)),
        ("$(a 'b)' \\) (c))d", ShellWord("$(a 'b)' \\) (c))d", True, True, 0, 17)),
        ("`a b`", ShellWord("`a b`", True, True, 0, 5)),
        ('"`a b`"', ShellWord("`a b`", True, False, 0, 7)),
        ("~/x", ShellWord("~/x", True, False, 0, 3)),
        ("a~", ShellWord("a~", False, False, 0, 2)),
        ("$", ShellWord("$", False, False, 0, 1)),
        ("a$", ShellWord("a$", False, False, 0, 2)),
        ("$1$?", ShellWord("$1$?", True, True, 0, 4)),
    ],
)
def test_a_word_records_whether_the_shell_expands_it_and_into_how_many_words(
    text: str, word: ShellWord
) -> None:
    (command,) = simple_commands(text)
    assert command == SimpleCommand((word,), "", "")


@pytest.mark.parametrize(
    "text",
    [
        "'a",
        '"a',
        '"$(a"',
        "`a",
        "$(a",
        "${a",
        "(a)",
        "a | (b)",
        "f() { a; }",
        "case a in b) c;; esac",
        "a <<E",
    ],
)
def test_text_with_more_than_one_consecutive_command_is_unclear(text: str) -> None:
    with pytest.raises(UnclearCommand):
        simple_commands(text)


@given(
    st.lists(st.text(alphabet="ab '\"\\$`#;&|()<>\n~{}*!", min_size=0, max_size=6), min_size=1, max_size=5)
)
def test_quoted_words_are_read_back(parts: list[str]) -> None:
    text = " ".join(map(shlex.quote, ["x", *parts]))
    (command,) = simple_commands(text)
    assert [word.text for word in command.words] == ["x", *parts]
    assert not any(word.expands for word in command.words)
    assert [shlex.split(text[word.start : word.end])[0] for word in command.words] == ["x", *parts]


@given(st.text(alphabet="ab '\"\\$`#;&|()<>\n{}=-", max_size=30))
def test_any_text_is_read_or_unclear(text: str) -> None:
    places: list[int] = []
    with suppress(UnclearCommand):
        places = [word.start for command in simple_commands(text) for word in command.words]
    assert places == sorted(set(places))

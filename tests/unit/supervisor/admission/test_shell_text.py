from __future__ import annotations

import shlex
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor.admission.shell_text import (
    MAX_CHARS,
    ShellWord,
    SimpleCommand,
    UnclearCommand,
    simple_commands,
)


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
        "f() { a; }",
        "function f { a; }",
        "case a in b) c;; esac",
        "a;; b",
        "a <<E",
        "a <<E\nb\nE c",
        "a <<E\nb\n E\n",
        "a <<E 'b\nE\n'",
        "if a; then b",
        "(a",
        "a)",
        "if a; then b; done",
        "done",
        "(a) b",
        "if a; then b; fi c",
        "[[ a",
        "[[ a ]",
        pytest.param("a;" * (MAX_CHARS // 2) + "b", id="too long"),
    ],
)
def test_text_with_a_function_or_something_unclosed_is_unclear(text: str) -> None:
    with pytest.raises(UnclearCommand):
        simple_commands(text)


def test_a_text_that_linux_accepts_is_read_whatever_its_length() -> None:
    assert len(simple_commands("a;" * (MAX_CHARS // 2))) == MAX_CHARS // 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("if a; then b; else c; fi; d", "if:a if:b if:c :d"),
        ("if a\nthen b\nelif c\nthen d\nfi\ne", "if:a if:b if:c if:d :e"),
        ("while ! a; do b & done; c", "!:a while:b :c"),
        ("until a; do b; done | c", "until:a until:b :c"),
        ("for x in p q; do a; done && b", "for:x for:a :b"),
        ("for ((i=0; i<3; i++)); do a; done; b", "(:i=0 (:i (:i++ for:a :b"),
        ("(a; b) && c", "(:a (:b :c"),
        ("a || { b; exit 1; }\nc", ":a {:b {:exit :c"),
        ("(if a; then (b); fi); c", "if:a (:b :c"),
        ("if [[ -n $A && ( $B < 2 || $C =~ ^(x|y)$ ) ]]; then a; fi; b", "if:[[ if:a :b"),
        ("if a; then b; fi > log 2>&1; c", "if:a if:b :c"),
        ("! a; b", "!:a :b"),
        ("time a; b", "time:a :b"),
        ("echo if; 'if' a; fi=1", ":echo :if :fi=1"),
        ("cat <<'E' > f\nif (a 'b\nE\nc", ":cat :c"),
        ("cat <<-E <<F\n\tx\n\tE\ny\nF\nc", ":cat :c"),
        ("a <<< word; b", ":a :b"),
        ("a <<E | b\n$(\nE\n\nc", ":a :b :c"),
    ],
)
def test_a_command_says_within_which_compound_command_it_is(text: str, expected: str) -> None:
    found = [f"{each.within}:{each.words[0].text}" for each in simple_commands(text)]
    assert " ".join(found) == expected


def test_a_command_after_a_compound_command_knows_the_operator_between_them() -> None:
    found = {each.words[0].text: each.before for each in simple_commands("if a; then b; fi | c; (d) & e")}
    assert (found["c"], found["e"]) == ("|", "&")


def test_redirections_of_a_compound_command_are_not_those_of_the_next() -> None:
    *_, last = simple_commands("(a) > x; b")
    assert last.redirections == ()


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

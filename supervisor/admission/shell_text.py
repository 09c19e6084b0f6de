"""Read the text of `sh -c`: its simple commands, and the positions of their words. Pure.

Only a plain sequence of commands is read: a training command within `if`, a loop, a function or a subshell is
left to the user. Nothing is expanded. A word that the shell would expand is marked, so that its text is not
mistaken for its value.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_RESERVED = frozenset(
    {
        *(
            "if",
            "then",
            "else",
            "elif",
            "fi",
            "case",
            "esac",
            "for",
            "while",
            "until",
            "select",
            "do",
            "done",
        ),
        *("function", "time", "coproc", "{", "}", "!", "[["),
    }
)
_REDIRECTION = re.compile(r"(?:\d*|&)(?:>>|>\||>&|<&|<>|<<<|<<-?|>|<)")
_OPERATOR = re.compile(r"&&|\|\||\|&|;;|[;&|()\n]")
_BLANK = re.compile(r"(?:[ \t]|\\\n)+")
_COMMENT = re.compile(r"#[^\n]*")
_VARIABLE = re.compile(r"[A-Za-z_]\w*|[@*#?$!\-0-9]", re.ASCII)


class UnclearCommand(ValueError):
    """A command cannot be understood with certainty. The message says why."""


@dataclass(frozen=True, slots=True)
class ShellWord:
    """One word of a command.

    Attributes:
        text: The word without its quotes, with expansions as they are written.
        expands: Whether the shell or Kubernetes replaces a part of it.
        splits: Whether the replaced part is not quoted, so that the word may become several words, or none.
        start, end: Its position in the text of the shell.
    """

    text: str
    expands: bool = False
    splits: bool = False
    start: int = 0
    end: int = 0


@dataclass(frozen=True, slots=True)
class SimpleCommand:
    """One command: its words without redirections, and the operators around it ("" at an end of the text)."""

    words: tuple[ShellWord, ...]
    before: str
    after: str
    redirections: tuple[int, ...] = ()  # their positions


def simple_commands(text: str) -> tuple[SimpleCommand, ...]:
    """Return the commands of `text` in order.

    Raises:
        UnclearCommand: The text is not a sequence of simple commands, or a quote is not closed.
    """
    found: list[SimpleCommand] = []
    words, redirections, before, place = list[ShellWord](), list[int](), "", 0
    while place < len(text):
        if blank := _BLANK.match(text, place) or _COMMENT.match(text, place):
            place = blank.end()
        elif redirection := _REDIRECTION.match(text, place):
            redirections.append(place)
            place = _after_redirection(text, redirection)
        elif operator := _OPERATOR.match(text, place):
            if words:
                found.append(_command(words, before, operator[0], redirections))
                words, redirections, before = [], [], operator[0]
            elif operator[0] in "()":
                raise UnclearCommand("it has a subshell or a function")
            place = operator.end()
        else:
            words.append(_word(text, place))
            place = words[-1].end
    if words:
        found.append(_command(words, before, "", redirections))
    return tuple(found)


def _command(words: list[ShellWord], before: str, after: str, redirections: list[int]) -> SimpleCommand:
    if words[0].text in _RESERVED and not words[0].expands:
        raise UnclearCommand(f"it has a compound command ({words[0].text})")
    if after in ("(", ")", ";;"):
        raise UnclearCommand("it has a subshell or a function")
    return SimpleCommand(tuple(words), before, after, tuple(redirections))


def _after_redirection(text: str, operator: re.Match[str]) -> int:
    """Return where the target of a redirection ends."""
    if operator[0].endswith(("<<", "<<-")):
        raise UnclearCommand("it has a here-document")
    blank = _BLANK.match(text, operator.end())
    place = blank.end() if blank else operator.end()
    if place >= len(text) or _OPERATOR.match(text, place):
        raise UnclearCommand("a redirection has no target")
    return _word(text, place).end


def _word(text: str, start: int) -> ShellWord:
    """Return the word that begins at `start`, where there is neither a blank nor an operator."""
    place, pieces, expands, splits = start, list[str](), False, False
    while place < len(text):
        char = text[place]
        if char in " \t\n;&|()<>":
            break
        if char == "'":
            end = _closing(text, "'", place + 1)
            pieces.append(text[place + 1 : end])
            place = end + 1
        elif char == '"':
            piece, has_expansion, place = _double_quoted(text, place + 1)
            pieces.append(piece)
            expands = expands or has_expansion
        elif char == "\\" and place + 1 < len(text):
            pieces.append(text[place + 1].replace("\n", ""))
            place += 2
        elif end := _expansion(text, place):
            pieces.append(text[place:end])
            expands = splits = True
            place = end
        else:
            expands = expands or (char == "~" and place == start)
            pieces.append(char)
            place += 1
    return ShellWord("".join(pieces), expands, splits, start, place)


def _double_quoted(text: str, place: int) -> tuple[str, bool, int]:
    """Return the text up to the closing quote, whether it is expanded, and the position after the quote."""
    pieces, expands = list[str](), False
    while place < len(text) and text[place] != '"':
        if text[place] == "\\" and text[place + 1 : place + 2] in ("$", "`", '"', "\\", "\n"):
            pieces.append(text[place + 1].replace("\n", ""))
            place += 2
        elif end := _expansion(text, place):
            pieces.append(text[place:end])
            expands, place = True, end
        else:
            pieces.append(text[place])
            place += 1
    if place >= len(text):
        raise UnclearCommand('a " is not closed')
    return "".join(pieces), expands, place + 1


def _expansion(text: str, place: int) -> int:
    """Return where the expansion at `place` ends; 0 if there is none."""
    if text[place] == "`":
        return _closing(text, "`", place + 1) + 1
    if text[place] != "$":
        return 0
    opening = text[place + 1 : place + 2]
    if opening in ("(", "{"):
        return _closing_bracket(text, opening, ")" if opening == "(" else "}", place + 2)
    name = _VARIABLE.match(text, place + 1)
    return name.end() if name else 0


def _closing_bracket(text: str, opening: str, closing: str, place: int) -> int:
    """Return the position after the bracket that closes an expansion."""
    depth = 1
    while place < len(text):
        if text[place] == "'":
            place = _closing(text, "'", place + 1)
        elif text[place] == "\\":
            place += 1
        elif text[place] in (opening, closing):
            depth += 1 if text[place] == opening else -1
            if depth == 0:
                return place + 1
        place += 1
    raise UnclearCommand(f"a {opening} is not closed")


def _closing(text: str, quote: str, place: int) -> int:
    end = text.find(quote, place)
    if end < 0:
        raise UnclearCommand(f"a {quote} is not closed")
    return end

"""Parse the text of `sh -c` into simple commands, with the positions of their words. Pure.

A command within `if`, a loop, a group or a subshell is marked, because it may run several times or not at
all. Functions and `case` are refused. Here-documents are skipped. Nothing is expanded, but a word that the
shell would expand is marked, so that its text is not mistaken for its value.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_CLOSERS = {"if": "fi", "for": "done", "while": "done", "until": "done", "select": "done", "{": "}", "(": ")"}
_WITHIN = frozenset({"then", "elif", "else", "do"})  # followed by a command in the same compound command
_PREFIXES = frozenset({"!", "time"})  # change the meaning of only the next command
_UNREAD = frozenset({"case", "esac", "function", "coproc"})
MAX_CHARS = 128 << 10  # Linux does not start a program with a longer argument
_REDIRECTION = re.compile(r"(?:\d*|&)(?:>>|>\||>&|<&|<>|<<<|<<-?|>|<)")
_OPERATOR = re.compile(r"&&|\|\||\|&|;;|[;&|()\n]")
_BLANK = re.compile(r"(?:[ \t]|\\\n)+")
_COMMENT = re.compile(r"#[^\n]*")
_VARIABLE = re.compile(r"[A-Za-z_]\w*|[@*#?$!\-0-9]", re.ASCII)


class UnclearCommand(ValueError):
    """What a command does cannot be determined. The message says why."""


@dataclass(frozen=True, slots=True)
class ShellWord:
    """One word of a command.

    Attributes:
        text: The word without its quotes; nothing in it is expanded.
        expands: True if the shell or Kubernetes expands a part of the word.
        splits: True if that part is not quoted, so the word may become several words, or none.
        start, end: The position of the word in the shell's text.
    """

    text: str
    expands: bool = False
    splits: bool = False
    start: int = 0
    end: int = 0


@dataclass(frozen=True, slots=True)
class SimpleCommand:
    """One command of a shell's text.

    Attributes:
        words: The words of the command, without redirections.
        before: The operator before the command; "" at the beginning of the text.
        after: The operator after the command; "" at the end of the text.
        redirections: The positions of the command's redirections.
        within: The word that begins the innermost enclosing compound command, such as "if" or "(".
    """

    words: tuple[ShellWord, ...]
    before: str
    after: str
    redirections: tuple[int, ...] = ()
    within: str = ""


def simple_commands(text: str) -> tuple[SimpleCommand, ...]:
    """Return the commands of `text` in order.

    Raises:
        UnclearCommand: The text contains a function or a `case`, is incomplete, or is too long.
    """
    if len(text) > MAX_CHARS:
        raise UnclearCommand(f"it has more than {MAX_CHARS} characters")
    reader = _CommandReader(text)
    while reader.place < len(text):
        reader.advance()
    return reader.finish()


class _CommandReader:
    """Parses a text, one command after another. Methods raise `UnclearCommand`."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.place = 0
        self.found: list[SimpleCommand] = []
        self.words: list[ShellWord] = []
        self.redirections: list[int] = []
        self.before = ""
        self.open: list[str] = []  # the compound commands around `place`
        self.prefix = ""  # `!` or `time` before the words
        self.is_closed = False  # True if a compound command has just ended and an operator must follow
        self.documents: list[tuple[str, bool]] = []  # here-documents that begin on the next line

    def advance(self) -> None:
        """Read the next blank, redirection, operator or word."""
        text, place = self.text, self.place
        if blank := _BLANK.match(text, place) or _COMMENT.match(text, place):
            self.place = blank.end()
        elif redirection := _REDIRECTION.match(text, place):
            self.redirections.append(place)
            self.place = self._after_redirection(redirection)
        elif operator := _OPERATOR.match(text, place):
            self.place = operator.end()
            self._operator(operator[0])
        else:
            word = _word(text, place)
            self.place = word.end
            if self.documents and "\n" in text[place : word.end]:
                raise UnclearCommand("a word of several lines follows a here-document")
            if self.words or not self._take_reserved(word):
                self._add(word)

    def finish(self) -> tuple[SimpleCommand, ...]:
        """End the text, and return all commands."""
        self._end("")
        if self.open or self.documents:
            raise UnclearCommand(f"a {self.open[-1] if self.open else 'here-document'} is not closed")
        return tuple(self.found)

    def _add(self, word: ShellWord) -> None:
        if self.is_closed:
            raise UnclearCommand(f"{word.text} follows the end of a compound command")
        self.words.append(word)
        if word.text == "[[" and len(self.words) == 1:
            self.place = self._after_test()

    def _take_reserved(self, word: ShellWord) -> bool:
        """Take a word that begins, divides or ends a compound command. Return False for any other word."""
        name = self.text[word.start : word.end]  # a quoted word is not reserved
        if name in _UNREAD:
            raise UnclearCommand(f"it has a compound command ({name})")
        if name in _PREFIXES:
            self.prefix = name
        elif name in _CLOSERS:
            self.open.append(name)
        elif name in _CLOSERS.values():
            self._close(name)
        elif name not in _WITHIN:
            return False
        self.is_closed = name in _CLOSERS.values()
        return True

    def _close(self, closer: str) -> None:
        if not self.open or _CLOSERS[self.open[-1]] != closer:
            raise UnclearCommand(f"a {closer} does not match anything")
        self.open.pop()
        self.prefix = ""

    def _operator(self, operator: str) -> None:
        if operator == "(":
            if self.words:
                raise UnclearCommand("it defines a function")
            self.open.append("(")
            self.is_closed = False
            return
        if operator == ";;":
            raise UnclearCommand("it has a compound command (case)")
        if self.words or self.is_closed:
            self._end(operator)
            self.before, self.is_closed = operator, False
        if operator == ")":
            self._close(")")
            self.is_closed = True
        elif operator == "\n":
            self._skip_documents()

    def _end(self, operator: str) -> None:
        """End the current command, if there is one."""
        if self.words:
            within = self.prefix or (self.open[-1] if self.open else "")
            around = (self.before, operator, tuple(self.redirections), within)
            self.found.append(SimpleCommand(tuple(self.words), *around))
        self.words, self.redirections, self.prefix = [], [], ""

    def _after_redirection(self, operator: re.Match[str]) -> int:
        """Return the position after the target of a redirection."""
        blank = _BLANK.match(self.text, operator.end())
        place = blank.end() if blank else operator.end()
        if place >= len(self.text) or _OPERATOR.match(self.text, place):
            raise UnclearCommand("a redirection has no target")
        word = _word(self.text, place)
        if operator[0].endswith(("<<", "<<-")) and not operator[0].endswith("<<<"):
            self.documents.append((word.text, operator[0].endswith("-")))
        return word.end

    def _skip_documents(self) -> None:
        """Skip the here-documents that begin on the next line."""
        while self.documents:
            (end, has_tabs), line = self.documents[0], None
            while line != end:
                if self.place >= len(self.text):
                    raise UnclearCommand("a here-document is not closed")
                newline = self.text.find("\n", self.place)
                stop = newline if newline >= 0 else len(self.text)
                line = self.text[self.place : stop]
                line = line.lstrip("\t") if has_tabs else line
                self.place = min(stop + 1, len(self.text))
            del self.documents[0]

    def _after_test(self) -> int:
        """Return the position after `[[ ... ]]`, where operators have a different meaning."""
        place = self.place
        while place < len(self.text):
            if blank := _BLANK.match(self.text, place):
                place = blank.end()
            elif self.text[place] in "\n;&|()<>":
                place += 1
            else:
                word = _word(self.text, place)
                place = word.end
                if self.text[word.start : word.end] == "]]":
                    return place
        raise UnclearCommand("a [[ is not closed")


def _word(text: str, start: int) -> ShellWord:
    """Return the word that begins at `start`. There must be no blank or operator at `start`."""
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
    """Return the text up to the closing quote, whether it contains an expansion, and the end position."""
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
    """Return the position after the expansion at `place`; 0 if there is no expansion."""
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
    """Return the position after the closing bracket of an expansion."""
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

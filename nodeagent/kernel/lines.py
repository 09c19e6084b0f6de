"""What one line of the kernel tells, by the drivers' formats and by the policy's table. Pure."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

from nodeagent.kernel import nvidia
from nodeagent.kernel.seen import CLEARED, Seen, quoted
from nodeagent.policy.kernel_lines import Line

MAX_LINE = 4096  # characters that are looked at: the kernel's own limit is 2048 (PRINTK_MESSAGE_MAX)


class Lines:
    """Knows the lines that mean something."""

    def __init__(self, lines: Iterable[Line]) -> None:
        self._lines = tuple(lines)
        hints = {*nvidia.HINTS, *(line.has for line in self._lines)}
        pattern = _any_of(sorted(hints))
        self._hinted = re.compile(pattern)
        # A log escapes what does not print, and its backslashes: elsewhere a hint is there as it is.
        plain = all(each.isascii() and each.isprintable() and "\\" not in each for each in hints)
        self._hinted_raw = re.compile(pattern.encode() if plain else b"")

    def worth(self, text: str) -> bool:
        """Say whether a line may mean something; what is refused does not. In one pass: nearly all are."""
        return self._hinted.search(text) is not None

    def worth_raw(self, raw: bytes) -> bool:
        """Say the same of a whole record that has not been taken apart; cheap."""
        return self._hinted_raw.search(raw) is not None

    def read(self, text: str) -> tuple[Seen, ...]:
        """Return what a line tells, mostly nothing. Never raises, in time linear in its length."""
        text = text[:MAX_LINE]
        if not self.worth(text):
            return ()
        return nvidia.parse(text) or self._told(text)

    def _told(self, text: str) -> tuple[Seen, ...]:
        for line in self._lines:
            match = line.pattern.match(text) if line.has in text else None
            if match is not None:
                check = CLEARED if line.ends else line.check
                return (Seen(check, line.of(match), text=quoted(text), facts=line.facts(match)),)
        return ()


def _any_of(words: list[str]) -> str:
    """Return the pattern of any of `words`, none of them the empty one, as a tree: each character once."""
    rests: dict[str, list[str]] = defaultdict(list)
    for each in words:
        rests[each[0]].append(each[1:])
    branches = [
        re.escape(first) + (_any_of(rest) if all(rest) else "")  # a word that ends here is enough
        for first, rest in rests.items()
    ]
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"

"""The checks that are one figure of one or few files of /proc: memory, files, process ids, load."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from nodeagent.host import files, load, memory, pids
from nodeagent.observation import NODE
from nodeagent.reading import SMALL_BYTES, LeftOut, Reading, content


@dataclass(frozen=True, slots=True)
class Figure:
    """Files below /proc, and what makes a value of what they say."""

    files: tuple[str, ...]
    value: Callable[..., float | None]


def _load(loadavg: bytes) -> float | None:
    return load.each_core(loadavg, os.sysconf("SC_NPROCESSORS_ONLN"))


FIGURES: Mapping[str, Figure] = {
    "memory_used": Figure(("meminfo",), memory.used),
    "files_used": Figure(("sys/fs/file-nr",), files.used),
    "pids_used": Figure(("loadavg", "sys/kernel/pid_max", "sys/kernel/threads-max"), pids.used),
    "load": Figure(("loadavg",), _load),
}


class Tables:
    """Reads them. `proc` is the root of a procfs."""

    checks = frozenset(FIGURES)

    def __init__(self, proc: str) -> None:
        self._proc = proc
        self._left_out: dict[str, LeftOut] = {}

    def read(self, due: frozenset[str], now_s: float) -> Iterable[Reading]:
        found = []
        for check in sorted(due & self.checks):
            figure = FIGURES[check]
            raw = [content(f"{self._proc}/{each}", SMALL_BYTES) for each in figure.files]
            value = None if None in raw else figure.value(*raw)
            self._left_out.pop(check, None)
            if value is None:
                self._left_out[check] = LeftOut(
                    check, f"{self._proc}: {' or '.join(figure.files)} does not say"
                )
            else:
                found.append(Reading(check, NODE, round(value, 3)))
        return found

    def left_out(self) -> tuple[LeftOut, ...]:
        return tuple(self._left_out.values())

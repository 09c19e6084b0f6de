"""Measure the time inside chosen functions of a process, without changes to their code.

Uses only the standard library, because it runs in the ranks.
"""

from __future__ import annotations

import functools
import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

OUTPUT = "HOLDFAST_BENCH_SPENT"  # gives the ranks the folder where each writes a file
INSIDE, WHOLE = "inside", "whole"
SKIP = "HOLDFAST_BENCH_SKIP"  # gives the ranks the number of steps after which the stopwatch is reset


@dataclass(slots=True)
class Spent:
    """The calls of one name. A call nested in another timed call counts in both."""

    calls: int = 0
    wall_s: float = 0.0
    worst_s: float = 0.0


class Stopwatch:
    """Times the wrapped calls of one thread.

    `outer` is the wall clock time in the outermost calls, and `outer_cpu_s` their CPU time. The CPU time of
    holdfast's own threads is counted separately, over all steps.

    Timing a nested call costs as much as some of these calls take, so `turn` makes some steps time every
    call, and others only the outermost ones.
    """

    def __init__(self) -> None:
        self.spent: dict[str, Spent] = {}
        self.outer = Spent()
        self.outer_cpu_s = 0.0
        self.steps = {INSIDE: 0, WHOLE: 0}
        self._depth = 0
        self._threads_before_s = 0.0
        self._looks: tuple[str, ...] = (INSIDE, WHOLE)  # calls count for both until `turn` is called

    def turn(self, what: str) -> None:
        """Begin a step, and time all its calls (`INSIDE`) or only the outermost ones (`WHOLE`)."""
        self.steps[what] += 1
        self._looks = (what,)

    def reset(self) -> None:
        """Discard all measurements so far, because the first steps are slower."""
        for name in self.spent:
            self.spent[name] = Spent()
        self.outer, self.outer_cpu_s = Spent(), 0.0
        self.steps = {INSIDE: 0, WHOLE: 0}
        self._threads_before_s = cpu_of_threads()

    def wrap(self, owner: Any, attribute: str, name: str) -> None:
        """Replace a function of a class or module with a wrapper that times it as `name`."""
        original: Callable[..., Any] = getattr(owner, attribute)
        self.spent.setdefault(name, Spent())

        @functools.wraps(original)
        def timed(*args: Any, **named: Any) -> Any:
            if self._depth and INSIDE not in self._looks:
                return original(*args, **named)
            outermost = self._depth == 0
            self._depth += 1
            cpu = time.thread_time() if outermost else 0.0
            began = time.perf_counter()
            try:
                return original(*args, **named)
            finally:
                took_s = time.perf_counter() - began
                self._depth -= 1
                if INSIDE in self._looks:
                    _add(self.spent[name], took_s)
                if outermost and WHOLE in self._looks:
                    _add(self.outer, took_s)
                    self.outer_cpu_s += time.thread_time() - cpu

        setattr(owner, attribute, timed)

    def write(self, path: Path) -> None:
        """Write all sums as JSON, atomically."""
        found = {
            "steps": self.steps,
            "outer": asdict(self.outer),
            "outer_cpu_s": self.outer_cpu_s,
            "threads_cpu_s": cpu_of_threads() - self._threads_before_s,
            "spent": {name: asdict(each) for name, each in self.spent.items()},
        }
        scratch = path.with_name(f".{path.name}.{os.getpid()}")
        scratch.write_text(json.dumps(found))
        scratch.replace(path)


def cpu_of_threads(prefix: str = "holdfast") -> float:
    """Return the CPU seconds used so far by this process's threads whose names begin with `prefix`."""
    total_s = 0.0
    for thread in threading.enumerate():
        if thread.name.startswith(prefix) and thread.ident is not None:
            try:
                total_s += time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
            except OSError:  # the thread has just ended
                continue
    return total_s


def _add(spent: Spent, took_s: float) -> None:
    spent.calls += 1
    spent.wall_s += took_s
    spent.worst_s = max(spent.worst_s, took_s)

"""Measure the time inside chosen calls of a process, without a change to their code.

Standard library only: it runs in the ranks.
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

OUTPUT = "HOLDFAST_BENCH_SPENT"  # names a folder to the ranks, for one file of each
INSIDE, WHOLE = "inside", "whole"
SKIP = "HOLDFAST_BENCH_SKIP"  # steps after which the stopwatch is reset


@dataclass(slots=True)
class Spent:
    """Calls of one name. A call inside another timed call counts in both."""

    calls: int = 0
    wall_s: float = 0.0
    worst_s: float = 0.0


class Stopwatch:
    """Times the calls of one thread. `outer` is the time in any of the calls, counted once.

    It is measured by wall clock and CPU. The CPU time of holdfast's own threads is counted separately, over
    all steps.

    Timing a nested call costs as much as some of these calls take. So `turn` divides the steps: in some the
    nested calls are timed, in the others only the outermost ones.
    """

    def __init__(self) -> None:
        self.spent: dict[str, Spent] = {}
        self.outer = Spent()
        self.outer_cpu_s = 0.0
        self.steps = {INSIDE: 0, WHOLE: 0}
        self._depth = 0
        self._threads_before_s = 0.0
        self._looks: tuple[str, ...] = (INSIDE, WHOLE)  # both, unless `turn` is called

    def turn(self, what: str) -> None:
        """Begin a step in which nested calls (`INSIDE`) or outermost ones (`WHOLE`) are timed."""
        self.steps[what] += 1
        self._looks = (what,)

    def reset(self) -> None:
        """Discard what was measured so far, because the first steps are slower."""
        for name in self.spent:
            self.spent[name] = Spent()
        self.outer, self.outer_cpu_s = Spent(), 0.0
        self.steps = {INSIDE: 0, WHOLE: 0}
        self._threads_before_s = cpu_of_threads()

    def wrap(self, owner: Any, attribute: str, name: str) -> None:
        """Replace a function of a class or module with one that is timed as `name`."""
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
    """Return the CPU seconds so far of this process's threads whose names begin with `prefix`."""
    total_s = 0.0
    for thread in threading.enumerate():
        if thread.name.startswith(prefix) and thread.ident is not None:
            try:
                total_s += time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
            except OSError:  # it has just ended
                continue
    return total_s


def _add(spent: Spent, took_s: float) -> None:
    spent.calls += 1
    spent.wall_s += took_s
    spent.worst_s = max(spent.worst_s, took_s)

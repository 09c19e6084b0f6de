"""`python -m bench mutation`: measure how many small changes to the code the tests notice.

mutmut makes the changes, called mutants, in the pure modules and the file formats: it reverses a comparison,
omits an argument or changes a string. For each mutant it runs the unit tests that execute the changed
function. A mutant that no test notices survives: either a test is missing, or the change makes no difference.
The settings and the list of modules are in pyproject.toml, `[tool.mutmut]`.

mutmut keeps its results in `mutants/` and checks only the mutants of functions that have changed since.
Checking all mutants takes hours on two cores, so name some or draw a sample.
"""

from __future__ import annotations

import argparse
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from bench.harness.console import make_parser, say
from bench.harness.launchers import Failed
from bench.text import percent, table

TARGET = 0.95
MUTMUT = Path(sys.executable).with_name("mutmut")
NOTICED = frozenset({"killed", "timeout", "segfault", "caught by type check"})
UNNOTICED = frozenset({"survived", "no tests"})
SMALLEST = "holdfast.protocol.lineage*"  # checked first, because this run creates the mutants to draw from
_LINE = re.compile(r"^\s+(\S+__mutmut_\d+): (.+)$", re.MULTILINE)
_EXAMPLES = """examples:
  python -m bench mutation 'supervisor.decision.*'   all mutants of the decision
  python -m bench mutation --sample 500              500 mutants, drawn from all modules
  python -m bench mutation --report                  the results so far, without checking more
"""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One mutant. `name` is its name for `mutmut show`; `verdict` is mutmut's word for its result."""

    name: str
    verdict: str

    @property
    def module(self) -> str:
        return re.sub(r"\.x(?:_|ǁ).*$", "", self.name)


def read(text: str) -> list[Mutant]:
    """Return the mutants that `mutmut results --all true` lists."""
    return [Mutant(name, verdict) for name, verdict in _LINE.findall(text)]


def chosen(mutants: Sequence[Mutant], patterns: Sequence[str], sample: int, seed: int) -> list[str]:
    """Return the names that match any of `patterns`, or all names if there are no patterns.

    If `sample` is not 0, return only that many of them, drawn at random.
    """
    names = [
        each.name for each in mutants if not patterns or any(fnmatch(each.name, one) for one in patterns)
    ]
    if not 0 < sample < len(names):
        return names
    return sorted(random.Random(seed).sample(names, sample))


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch(name, each) for each in patterns)


def noticed(mutants: Iterable[Mutant]) -> tuple[int, int]:
    """Return how many of `mutants` the tests noticed, and how many have been checked."""
    verdicts = [each.verdict for each in mutants]
    return sum(each in NOTICED for each in verdicts), sum(each in NOTICED | UNNOTICED for each in verdicts)


def report(mutants: Sequence[Mutant]) -> str:
    """Return a table of the modules with checked mutants, followed by the names of the survivors."""
    rows = []
    for module in sorted({each.module for each in mutants}):
        killed, checked = noticed(each for each in mutants if each.module == module)
        if checked:
            rows.append((module, str(checked), str(checked - killed), percent(killed / checked, 1)))
    killed, checked = noticed(mutants)
    if not checked:
        return "no mutant has been checked"
    rows.append(("all", str(checked), str(checked - killed), percent(killed / checked, 1)))
    survivors = [each.name for each in mutants if each.verdict in UNNOTICED]
    lines = [table(("module", "mutants", "survived", "noticed"), rows)]
    if survivors:
        lines += ["", "Survivors, for `.venv/bin/mutmut show NAME`:", *(f"  {each}" for each in survivors)]
    other = Counter(each.verdict for each in mutants if each.verdict not in NOTICED | UNNOTICED)
    unchecked = other.pop("not checked", 0)
    lines += ["", f"{unchecked} mutants are not checked"] if unchecked else []
    lines += [f"{count} mutants have no verdict: {verdict}" for verdict, count in sorted(other.items())]
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    options = _parse(argv)
    if not MUTMUT.exists():
        raise Failed("mutmut is not installed; `make mutate` installs it")
    if not options.report:
        if options.sample:
            _mutmut(["run", SMALLEST])  # creates all mutants and records which tests execute which function
            names = chosen(_results(), options.mutants, options.sample, options.seed)
        else:
            names = list(options.mutants)
        _mutmut(["run", *names])
    mutants = _results()
    if options.mutants:
        mutants = [each for each in mutants if _matches(each.name, options.mutants)]
    say(report(mutants))
    killed, checked = noticed(mutants)
    if checked and killed < TARGET * checked:
        say(f"\n{percent(killed / checked, 1)} were noticed: expected {percent(TARGET, 0)} or more")
        return 1
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = make_parser("mutation", __doc__ or "", _EXAMPLES)
    parser.add_argument(
        "mutants", nargs="*", metavar="PATTERN", help="names of mutants; * and ? are wildcards"
    )
    parser.add_argument("--sample", type=int, default=0, metavar="N", help="number to draw; 0: all of them")
    parser.add_argument("--seed", type=int, default=1, help="seed of the sample")
    parser.add_argument("--report", action="store_true", help="print the results so far, check nothing")
    options = parser.parse_args(argv)
    if options.sample < 0:
        parser.error(
            f"invalid value '{options.sample}' for --sample: expected a number of mutants, 0 or more"
        )
    return options


def _mutmut(words: Sequence[str]) -> None:
    done = subprocess.run([str(MUTMUT), *words], check=False)
    if done.returncode:
        raise Failed(f"mutmut ended with code {done.returncode}: see its last lines above")


def _results() -> list[Mutant]:
    done = subprocess.run(
        [str(MUTMUT), "results", "--all", "true"], check=False, stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        raise Failed(f"mutmut results ended with code {done.returncode}")
    return read(done.stdout)

"""Measure how long a start takes, and how soon a killed supervisor or sidecar is replaced.

Starts: the time from the launcher's start to the first optimizer step of the last rank. Three launches of the
same script are interleaved (A B C, C B A, ...): holdfast with two members and a standby, holdfast with two
ranks in one member, and torchrun.

Parts: while a run is training, its supervisor and a sidecar get SIGKILL alternately. The time is from the
kill until the next supervisor answers or the next sidecar is connected. At first, replacements are forked
from their template. Then the bench kills the template, and each replacement starts in a new interpreter,
which repeats the imports.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from bench.harness import results
from bench.harness.console import make_parser, say
from bench.harness.launchers import holdfast_run, launch, torchrun
from bench.recovery.killing import wait_for_start
from bench.start import part_restarts
from bench.text import number, ratio, seconds, summary, table
from bench.workloads.modes import RANKS, Mode

SCRIPT = ("-m", "bench.workloads.protected")
MODES = (
    Mode("holdfast", "", tuple(holdfast_run(("--members", str(RANKS), "--standby", "1"), SCRIPT)), True),
    Mode("holdfast, one member", "", tuple(holdfast_run(("--nproc-per-node", str(RANKS)), SCRIPT)), True),
    Mode("torchrun", "", tuple(torchrun((f"--nproc-per-node={RANKS}",), SCRIPT)), False),
)


def main(argv: Sequence[str]) -> int:
    options = _parse(argv)
    found = results.begin("start")
    found["options"] = vars(options)
    starts: dict[str, list[float]] = {mode.name: [] for mode in MODES}
    for at in range(options.rounds):
        for mode in order(at):
            starts[mode.name].append(_start_s(mode))
            say(f"start {at + 1}: {mode.name} {seconds(starts[mode.name][-1])}")
    found["starts_s"] = starts
    found["missed_s"] = _replaced(options.kills) if options.kills else {}
    say("\n" + _table("start to the first step", starts, "torchrun"))
    for part in part_restarts.PARTS if options.kills else ():
        mine = {how: times[part] for how, times in found["missed_s"].items()}
        say("\n" + _table(f"{part} killed, until it is back", mine, part_restarts.COLD))
    results.write(found)
    return 0


def order(at: int) -> Sequence[Mode]:
    """Return the modes in the order of round `at`; every other round is reversed."""
    return MODES if at % 2 == 0 else MODES[::-1]


def _start_s(mode: Mode) -> float:
    running = launch("start", mode.argv)
    try:
        took_s = wait_for_start(running, mode)
        running.stop()
    finally:
        running.close()
    return took_s


def _replaced(kills: int) -> dict[str, dict[str, list[float]]]:
    running = launch("part-restarts", MODES[0].argv)
    try:
        wait_for_start(running, MODES[0])
        found = part_restarts.measure(running, kills, say)
        running.stop()
    finally:
        running.close()
    return found


def _table(what: str, times: dict[str, list[float]], base: str) -> str:
    against = summary(times[base]).median
    rows = []
    for name, each in times.items():
        all_of = summary(each)
        shares = number(ratio(all_of.median, against)), *map(seconds, (all_of.best, all_of.worst))
        rows.append((name, str(all_of.count), seconds(all_of.median), *shares))
    return table((what, "times", "median", f"to {base}", "best", "worst"), rows)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = make_parser("start", __doc__ or "")
    parser.add_argument(
        "--rounds", type=int, default=5, metavar="N", help="number of starts of each launcher"
    )
    parser.add_argument(
        "--kills",
        type=int,
        default=8,
        metavar="N",
        help="number of kills of each part, both with and without the template",
    )
    options = parser.parse_args(argv)
    if options.rounds < 1:
        parser.error(f"--rounds: {options.rounds}; expected 1 or more")
    if options.kills < 0:
        parser.error(f"--kills: {options.kills}; expected 0 or more")
    return options

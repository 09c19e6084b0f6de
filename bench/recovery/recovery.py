"""Measure the time from the kill of a rank to the first new optimizer step, under holdfast and torchrun.

All launchers are measured in the same way, interleaved. Each rank records the time right after each
optimizer.step(). A random rank gets SIGKILL at a random moment. The measured time is from the kill to the
first step of the *last* rank of the restarted group. Two ranks on this machine train one small DDP model.
Under torchrun nothing restores the state, which saves torchrun the time that loading a checkpoint would take.

The bench kills a rank only after every rank has completed 20 steps. Under holdfast it also waits until no
incident is open and the warm processes are ready (unless --back-to-back is given). It then waits a random
time of up to 0.5 s. If no step follows a kill within --patience, the group counts as hung, and the bench
kills the launcher and starts the next one.

The results hold for the given --state and --members. By default, the model has 0.4 M parameters, and the
group has one member. With the defaults, the bench takes about ten minutes, and another minute for each time
that torchrun hangs.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from bench.harness import memory_needs, results
from bench.harness.console import make_parser, say
from bench.harness.launchers import Failed
from bench.recovery import killing, report
from bench.recovery.killing import SETTLED_STEPS, Manner
from bench.recovery.turns import Kill, Turn
from bench.snapshot import transfer
from bench.text import all_met, seconds, size_of
from bench.workloads import modes
from bench.workloads.modes import Mode

COPIES = 3  # plain copies; the recovery of a large state is compared with their median
ATTEMPTS = 2  # how often the bench tries to start a launcher


def main(argv: Sequence[str]) -> int:
    options = _parse(argv)
    standby = 1 if options.kill == "member" else 0
    all_modes = modes.modes(options.members, size_of(options.state), standby)
    chosen = [mode for mode in all_modes if mode.name in options.modes]
    _check_room(options, chosen)
    found = results.begin("recovery")
    for mode in chosen:
        say(f"  {mode.name}: {mode.about}")
    what = f"a state of {options.state}" if size_of(options.state) else "the small model alone"
    say(f"{what}, {modes.RANKS} ranks on {options.members} members under holdfast, kills of a {options.kill}")
    wait = "without waiting for warm processes" if options.back_to_back else "once warm processes are ready"
    say(f"SIGKILL of a random rank, {wait}; time to the first new step of the last rank")
    chance = random.Random(options.seed)
    manner = Manner(options.patience, options.back_to_back, chance, options.kill == "member")
    turns: list[Turn] = []
    copy_s = math.nan
    try:
        for mode, count in plan(chosen, options.kills, options.others, options.rounds):
            turns += _turns(mode, count, manner)
        copy_s = _plain_copy(options)
    except KeyboardInterrupt:
        say("interrupted: results so far")
    return _end(found, turns, options, copy_s)


def _check_room(options: argparse.Namespace, chosen: Sequence[Mode]) -> None:
    """Raise `Failed` unless a state per rank and two snapshots per holdfast member fit into memory.

    A standby reserves memory for one snapshot. When a member has been killed, the memory of that member is
    freed only while another member is being prepared.
    """
    members = options.members if any(mode.name.startswith("holdfast") for mode in chosen) else 0
    shared = 2 * members + (3 if members and options.kill == "member" else 0)
    memory_needs.check("--state", size_of(options.state), shared=max(2, shared), beside=modes.RANKS)


def plan(chosen: Sequence[Mode], kills: int, others: int, rounds: int) -> list[tuple[Mode, int]]:
    """Return the turns in order, each with its number of kills.

    Each round runs all modes, and every other round runs them in reverse order. The kills of the mode
    "holdfast" add up to `kills`, and the kills of each other mode to `others`. The counts of a mode differ by
    at most one.
    """
    planned: list[tuple[Mode, int]] = []
    for at in range(rounds):
        order = chosen if at % 2 == 0 else list(reversed(chosen))
        for mode in order:
            total = kills if mode.name == "holdfast" else others
            count = total * (at + 1) // rounds - total * at // rounds
            if count:
                planned.append((mode, count))
    return planned


def _turns(mode: Mode, count: int, manner: Manner) -> list[Turn]:
    """Kill `count` times, and start a new launcher whenever one did not survive a kill."""
    turns: list[Turn] = []
    failures = 0
    left = count
    while left > 0:
        try:
            done = killing.turn(mode, left, manner, _tell)
        except Failed as error:
            failures += 1
            say(f"{mode.name}: did not start: {error}")
            if failures >= ATTEMPTS:
                raise SystemExit(f"recovery: {mode.name} did not start") from None
            continue
        left -= len(done.kills)
        turns.append(done)
        trouble = killing.problem(done)
        if trouble:
            say(f"NOTE {trouble}")
    return turns


def _tell(kill: Kill) -> None:
    parts = [f"{kill.mode:<20} rank {kill.rank} at step {kill.step:<6} {kill.outcome}"]
    if kill.took_s is not None:
        parts.append(f"{seconds(kill.took_s):>8}  steps redone {kill.redone}")
    if kill.incident is not None:
        parts.append(report.timeline(kill.incident))
    say("  ".join(parts))
    if kill.detail:
        say(f"  NOTE {kill.detail.strip().splitlines()[-1][:200] if kill.detail.strip() else ''}")


def _end(found: dict[str, Any], turns: list[Turn], options: argparse.Namespace, copy_s: float) -> int:
    found["plain_copy_s"] = copy_s
    verdicts = report.verdicts(turns, options.kills, copy_s)
    say()
    for line in report.lines(turns):
        say(line)
    say()
    for verdict in verdicts:
        say(verdict.line)
    found["options"] = vars(options)
    found["turns"] = [asdict(each) for each in turns]
    found["summary"] = report.summaries(turns)
    found["verdicts"] = [asdict(each) for each in verdicts]
    results.write(found)
    return 1 if options.strict and not all_met(verdicts) else 0


def _plain_copy(options: argparse.Namespace) -> float:
    """Return the seconds that a plain socket copy of the state takes; NaN for the small model alone."""
    total = size_of(options.state)
    return statistics.median(transfer.plain_copies(total, COPIES)) if total else math.nan


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    names = [mode.name for mode in modes.modes()]
    parser = make_parser("recovery", __doc__ or "")
    add = parser.add_argument
    add("--kills", type=int, default=50, metavar="N", help="number of kills under holdfast")
    add("--others", type=int, default=10, metavar="N", help="number of kills in each of the other modes")
    add("--rounds", type=int, default=5, metavar="N", help="number of interleaved turns of each mode")
    add(
        "--modes",
        nargs="+",
        choices=names,
        default=names,
        metavar="MODE",
        help=f"modes to measure: {', '.join(names)}",
    )
    add(
        "--back-to-back",
        action="store_true",
        help=f"kill again as soon as {SETTLED_STEPS} steps are completed, even if no warm process is ready",
    )
    add(
        "--state",
        default="0",
        metavar="SIZE",
        help="state to protect besides the small model, such as 1.5G",
    )
    add(
        "--members",
        type=int,
        default=1,
        choices=(1, modes.RANKS),
        help="number of members among which the ranks are divided",
    )
    add(
        "--kill",
        choices=("rank", "member"),
        default="rank",
        help="what to kill under holdfast: a rank, or the launcher of a member, which a standby replaces",
    )
    add(
        "--patience",
        type=float,
        default=60.0,
        metavar="S",
        help="seconds without a step until a group counts as hung",
    )
    add("--seed", type=int, default=0, help="seed for choosing ranks and times")
    add("--strict", action="store_true", help="exit with code 1 if a target is missed")
    options = parser.parse_args(argv)
    try:
        size_of(options.state)
    except ValueError as error:
        parser.error(f"--state: {error}")
    if options.kill == "member" and options.members < 2:
        parser.error("--kill member: needs --members 2, because another member must hold the state")
    for name in ("kills", "others"):
        if getattr(options, name) < 0:
            parser.error(f"--{name}: {getattr(options, name)} kills; expected 0 or more")
    if options.rounds < 1:
        parser.error(f"--rounds: {options.rounds}; expected 1 or more")
    return options

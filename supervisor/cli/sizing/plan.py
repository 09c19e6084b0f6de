"""`holdfast plan`: compute how many standbys and which checkpoint interval a job needs."""

from __future__ import annotations

import random

from supervisor.cli import command_options
from supervisor.cli.sizing import report
from supervisor.display.screen import say_all, say_json
from supervisor.options.plan_options import AUTO
from supervisor.planning.planner import plan
from supervisor.planning.simulation import Simulated, simulate


def show(command: command_options.PlanOptions) -> int:
    """Print the plan, and return the exit code."""
    own = None if command.standbys == AUTO else command.standbys
    found = plan(command, own or 0)
    rows = report.shown(found, own)
    simulated = _simulate(command, rows) if command.simulate else {}
    if command.json:
        say_json(report.as_json(found, own, simulated))
    else:
        say_all(report.lines(found, own, simulated))
    return 0


def _simulate(command: command_options.PlanOptions, rows: list[int]) -> dict[int, Simulated]:
    """Simulate each number of standbys. All rows use the same seed, so none depends on the others."""
    return {row: simulate(command, row, random.Random(command.seed).random) for row in rows}

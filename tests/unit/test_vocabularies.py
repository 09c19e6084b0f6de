"""Each word of an order or report is handled by the module that receives it."""

from __future__ import annotations

import ast
import re
from typing import Any, get_args

import pytest

from holdfast.launcher import launcher
from holdfast.launcher.workers import worker_group
from holdfast.protocol.drills import DRILLS, DrillExecutor, DrillName
from holdfast.protocol.launcher_messages import LauncherAction
from holdfast.protocol.member_messages import MemberAction
from holdfast.protocol.rank_channel import ForkAction, ForkServerReport, PoolReport, RankAction, RankReport
from holdfast.worker.drills import RankDrill
from sidecar import reconciler
from tests.unit.literals import ROOT


def compared(path: str, field: str) -> set[str]:
    """Return the texts with which `path` compares a field or a variable of this name."""
    return {
        each.value
        for node in ast.walk(ast.parse((ROOT / path).read_bytes()))
        if isinstance(node, ast.Compare) and ast.unparse(node.left).rpartition(".")[2] == field
        for side in node.comparators
        for each in ast.walk(side)
        if isinstance(each, ast.Constant) and isinstance(each.value, str)
    }


@pytest.mark.parametrize(
    ("words", "handled"),
    [
        (MemberAction, set(reconciler._PURSUITS)),
        (LauncherAction, set(launcher._HANDLERS)),
        (
            RankAction,
            compared("holdfast/worker/launcher_channel.py", "do")
            | compared("holdfast/training/session.py", "do"),
        ),
        (RankReport, set(worker_group._HANDLERS)),
        (
            PoolReport,
            compared("holdfast/launcher/workers/process_watch.py", "what")
            | compared("holdfast/launcher/workers/warm_pool.py", "what"),
        ),
        (ForkServerReport, compared("holdfast/launcher/workers/warm_pool.py", "what")),
    ],
    ids=["member", "launcher", "rank", "from a rank", "from a warm process", "from a fork server"],
)
def test_the_receiver_handles_each_word(words: Any, handled: set[str]) -> None:
    assert set(get_args(words)) <= handled


def test_a_fork_server_serves_each_of_its_orders() -> None:
    sources = [*(ROOT / "holdfast").rglob("*.py")]
    served = {
        node.args[1].value
        for path in sources
        for node in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("forks") and len(node.args) == 3
        if isinstance(node.args[1], ast.Constant)
    }
    assert served == set(get_args(ForkAction))


BY_RANKS = {
    each for field in ("name", "_pending") for each in compared("holdfast/worker/drills.py", field)
} - {""}
# The executors that recognise their drills by the row, and the module that does so.
BY_ROW = {
    "sidecar": "sidecar/reconciler.py",
    "supervisor": "supervisor/controller/supervised_run.py",
    "keeper": "supervisor/controller/supervised_run.py",  # the run calls the keeper directly
}


@pytest.mark.parametrize("name", DRILLS)
def test_the_process_named_in_a_drills_row_executes_it(name: str) -> None:
    drill = DRILLS[name]
    assert (drill.executor == "launcher") == bool(drill.signal)
    if drill.executor == "rank":
        assert name in BY_RANKS
    elif drill.executor != "launcher":
        assert drill.executor in compared(BY_ROW[drill.executor], "executor")


def test_no_process_executes_a_drill_that_the_table_lacks() -> None:
    assert list(DRILLS) == list(get_args(DrillName))
    assert {each.executor for each in DRILLS.values()} == set(get_args(DrillExecutor))
    assert {name for name, each in DRILLS.items() if each.executor == "rank"} == BY_RANKS


@pytest.mark.parametrize("name", DRILLS)
def test_a_drill_waits_for_the_next_step_if_its_row_says_so(name: str) -> None:
    waits = RankDrill()
    if name != "exit":
        waits.obey(name)
    assert bool(waits._pending) == DRILLS[name].at_next_step


def test_drills_are_single_words() -> None:
    assert all(re.fullmatch("[a-z]+", name) for name in DRILLS)

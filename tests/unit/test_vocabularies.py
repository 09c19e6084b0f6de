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


EXECUTES: dict[str, set[str]] = {
    "rank": compared("holdfast/worker/drills.py", "name"),
    "launcher": set(worker_group._DRILL_SIGNALS),
    "sidecar": compared("sidecar/reconciler.py", "what"),
    "supervisor": compared("supervisor/controller/job.py", "what"),
    "keeper": compared("supervisor/controller/job.py", "what"),  # the job calls the keeper directly
}


@pytest.mark.parametrize("name", DRILLS)
def test_the_process_named_in_a_drills_row_executes_it(name: str) -> None:
    assert name in EXECUTES[DRILLS[name].executor]


def test_no_process_executes_a_drill_that_the_table_lacks() -> None:
    assert list(DRILLS) == list(get_args(DrillName))
    assert EXECUTES.keys() == set(get_args(DrillExecutor))
    assert set().union(*EXECUTES.values()) <= DRILLS.keys()


def test_drills_are_single_words() -> None:
    assert all(re.fullmatch("[a-z]+", name) for name in DRILLS)

"""A message changes the state of a rank only if the right process sent it."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from holdfast.launcher.workers import worker_group
from holdfast.launcher.workers.warm_pool import MemberSettings
from holdfast.launcher.workers.worker_group import WorkerGroup
from holdfast.launcher.workers.worker_process import WorkerProcess
from holdfast.protocol import rank_channel
from holdfast.protocol.launcher_messages import BadNumber, Ending, Launch, RankStart, SecureAnswer, StartTimes
from holdfast.protocol.progress_writer import Page
from holdfast.protocol.rank_channel import ForkServerReport, PoolReport, RankReport, WorkerMessage
from holdfast.snapshot import member_directory
from tests.unit.literals import ROOT

OF_A_PROCESS = {*get_args(ForkServerReport), *get_args(PoolReport)}  # for fork servers and the warm pool
MESSAGES: dict[str, WorkerMessage] = {
    each.what: each
    for each in (
        WorkerMessage("failing", ending=Ending(1, 1, unwinding=True)),
        WorkerMessage("withdrawn"),
        WorkerMessage("started", marks=StartTimes(started_ns=1)),
        WorkerMessage("settled", marks=StartTimes(started_ns=1, first_step_ns=2)),
        WorkerMessage("flag", flag=BadNumber("nan", 3, "nan", 0, 1)),
        WorkerMessage("secured", secured=SecureAnswer(0, 3, True)),
        WorkerMessage("note", note="a note"),
        WorkerMessage("where", where="collective"),
        WorkerMessage("left", note="a reason"),
    )
}


@pytest.fixture
def group(tmp_path: Path) -> Iterator[WorkerGroup]:
    """Yield a group with one rank, which this process runs."""
    made = WorkerGroup(MemberSettings(tmp_path, tmp_path, "m0", 1, tmp_path, 0))
    made.begin(Launch(1, 1, 1, "", 0, 0, 0.0), (RankStart(0, 0),))
    ours, theirs = rank_channel.pair()
    made.workers[0].process = WorkerProcess(0, ours, tmp_path / "log", os.getpid())
    yield made
    for line in (ours, theirs):
        line.close()


def own_process(group: WorkerGroup) -> WorkerProcess:
    process = group.workers[0].process
    assert process is not None
    return process


def test_every_message_that_is_sent_has_a_receiver() -> None:
    calls = (
        node
        for path in (ROOT / "holdfast").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "WorkerMessage"
    )
    sent = {
        each.value
        for call in calls
        for each in ast.walk(call.args[0])
        if isinstance(each, ast.Constant) and isinstance(each.value, str)
    }
    assert sent == worker_group._HANDLERS.keys() | OF_A_PROCESS
    assert MESSAGES.keys() == worker_group._HANDLERS.keys() == set(get_args(RankReport))


@pytest.mark.parametrize("what", sorted(MESSAGES.keys() - {"withdrawn"}))
def test_a_message_of_the_rank_changes_its_state(group: WorkerGroup, what: str) -> None:
    before = group.state()
    group.receive(own_process(group), replace(MESSAGES[what], pid=os.getpid()))
    assert group.state() != before


@pytest.mark.parametrize("what", sorted(MESSAGES))
def test_a_message_of_a_forked_process_counts_only_if_it_was_left_behind(
    group: WorkerGroup, what: str
) -> None:
    before = group.state()
    group.receive(own_process(group), replace(MESSAGES[what], pid=os.getpid() + 1))
    assert (group.state() != before) == (what == "left")


@pytest.mark.parametrize("what", sorted({*MESSAGES, *OF_A_PROCESS, "unknown"}))
def test_a_message_of_a_process_without_a_rank_changes_nothing(
    group: WorkerGroup, what: Any, tmp_path: Path
) -> None:
    before = group.state()
    stranger = another_process(own_process(group), tmp_path)
    message = MESSAGES.get(what, WorkerMessage(what))
    group.receive(stranger, replace(message, pid=stranger.pid))
    assert group.state() == before


def another_process(process: WorkerProcess, folder: Path) -> WorkerProcess:
    return WorkerProcess(0, process.control, folder / "other", process.pid)


def test_a_withdrawn_ending_does_not_count_and_a_final_one_cannot_be_withdrawn(
    group: WorkerGroup,
) -> None:
    process, [worker] = own_process(group), group.workers
    group.receive(process, MESSAGES["failing"])
    group.receive(process, MESSAGES["withdrawn"])
    assert worker.ending is None
    group.receive(process, WorkerMessage("failing", ending=Ending(2, 1)))
    group.receive(process, MESSAGES["withdrawn"])
    group.receive(process, MESSAGES["failing"])
    assert worker.ending == Ending(2, 1)


@pytest.mark.parametrize("withdrawn", [False, True])
def test_the_copy_of_a_failing_rank_counts_only_if_the_rank_really_ends(
    group: WorkerGroup, tmp_path: Path, withdrawn: bool
) -> None:
    """If its exception is caught, it may take further steps and overwrite the copy."""
    page = Page.create(tmp_path / member_directory.page_name(0))
    page.begin(1, 0, 0, 1, 7)
    ending = Ending(1, 1, unwinding=True)
    failing = WorkerMessage("failing", os.getpid(), ending=ending, secured=SecureAnswer(0, 7, True))
    group.receive(own_process(group), failing)
    if withdrawn:
        group.receive(own_process(group), replace(MESSAGES["withdrawn"], pid=os.getpid()))
    assert group.state().secure_asked == 0
    group.securing.begin()
    assert group.securing.done != withdrawn

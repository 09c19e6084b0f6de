"""A decision waits for its log for a limited time, and its loss is always reported."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from supervisor.controller import journal_writer
from supervisor.controller.journal_writer import DecisionLog, JournalWriter
from supervisor.store import journal
from supervisor.store.run_lead import Deposed
from supervisor.view.model import JobState, Policy, RunAction, View, Wait
from tests.unit.supervisor.job_views import memory, view

LIMIT_S = 20.0
LEDGER = {"format": 1}


class Log:
    """A log that calls `act` before each line."""

    def __init__(self) -> None:
        self.lines: list[int] = []
        self.act: Callable[[], object] = lambda: None
        self.closed = threading.Event()

    def write(self, view: View, policy: Policy, action: RunAction, after: JobState, ledger: Any) -> None:
        self.act()
        self.lines.append(after.generation)

    def close(self) -> None:
        self.closed.set()


class Writer:
    """A writer, and a record of its reports of failures."""

    def __init__(self, held: JobState | None = None) -> None:
        self.log = Log()
        self.failures: list[str] = []
        self.said = asyncio.Event()
        log: DecisionLog = self.log
        self.writer = JournalWriter(log, held or memory(), self._failed)

    def _failed(self, why: str) -> None:
        self.failures.append(why)
        self.said.set()

    async def write(self, generation: int) -> None:
        after = memory(generation=generation)
        await self.writer.write(view(), Policy(), Wait(1), after, LEDGER)

    def look(self, state: JobState) -> None:
        self.writer.write_without_decision(view(), Policy(), Wait(1), state, lambda: LEDGER)

    async def settled(self) -> None:
        """Return once all submitted lines are written."""
        await asyncio.wrap_future(self.writer.thread.submit(lambda: None))
        await asyncio.sleep(0)


def fail(error: Exception) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


async def test_decisions_are_written_in_order_before_they_take_effect() -> None:
    made = Writer()
    for generation in range(5):
        await made.write(generation)
        assert made.log.lines == list(range(generation + 1))
    assert set(made.failures) == {""}
    made.writer.close()
    assert await asyncio.to_thread(made.log.closed.wait, LIMIT_S)


async def test_a_failing_log_delays_no_decision_and_is_reported() -> None:
    made = Writer()
    made.log.act = fail(OSError("no space"))
    await made.write(1)
    assert made.failures[-1] == "no space"
    made.log.act = lambda: None
    await made.write(2)
    assert (made.failures[-1], made.log.lines) == ("", [2])


async def test_a_replaced_supervisor_is_notified() -> None:
    made = Writer()
    made.log.act = fail(Deposed(1, 2))
    with pytest.raises(Deposed):
        await made.write(1)


async def test_an_unresponsive_log_is_waited_for_only_for_a_limited_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(journal_writer, "JOURNAL_S", 0.02)
    made, answers = Writer(), threading.Event()
    made.log.act = lambda: answers.wait(LIMIT_S)
    await made.write(1)
    assert "not responded for 0.02 s" in made.failures[-1]
    await made.write(2)
    assert made.log.lines == []
    made.said.clear()
    answers.set()
    await asyncio.wait_for(made.said.wait(), LIMIT_S)
    assert made.failures[-1] == "", "the newest line was written late"
    await made.settled()
    assert made.log.lines[-1] == 2


async def test_an_older_line_that_is_written_late_does_not_count_as_the_newest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(journal_writer, "JOURNAL_S", 0.02)
    made, answers = Writer(), threading.Event()

    def act() -> None:
        answers.wait(LIMIT_S)
        if made.log.lines:
            raise OSError("no space")

    made.log.act = act
    await made.write(1)
    await made.write(2)
    answers.set()
    await made.settled()
    await made.settled()
    assert made.log.lines == [1]
    assert made.failures[-1] == "no space"


async def test_the_first_state_that_a_member_holds_is_written_without_a_decision() -> None:
    made = Writer(memory())
    made.look(memory())
    await made.settled()
    assert made.log.lines == []
    for _ in range(3):
        made.look(replace(memory(generation=4), held=7))
    await made.settled()
    assert made.log.lines == [4], "once"


async def test_a_line_that_was_not_written_is_retried_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = Writer()
    made.log.act = fail(OSError("no space"))
    await made.write(1)
    made.log.act = lambda: None
    made.look(memory(generation=2))
    await made.settled()
    assert made.log.lines == [], "not yet"
    monkeypatch.setattr(journal, "RETRY_S", 0.0)
    made.said.clear()
    made.look(memory(generation=3))
    await asyncio.wait_for(made.said.wait(), LIMIT_S)
    assert (made.log.lines, made.failures[-1]) == ([3], "")
    made.look(memory(generation=4))
    await made.settled()
    assert made.log.lines == [3]

"""The journals of simulated histories match, byte for byte, those that an earlier version wrote."""

from __future__ import annotations

import json
from functools import cache
from typing import get_args

import pytest

from supervisor.view.model import RunAction
from tests.simulation import journals

recorded = cache(journals.recorded)
MOST_SHOWN = 20  # differences per history: most later ones follow from the first


def _name(line: bytes) -> str:
    found = json.loads(line)
    return f"{found['action']} in phase {found['view']['memory']['phase']}"


def test_each_history_is_recorded() -> None:
    assert list(recorded()) == list(journals.HISTORIES)


@pytest.mark.parametrize("history", journals.HISTORIES)
def test_the_journal_of_a_history_is_the_recorded_one(history: str) -> None:
    before, made = recorded()[history], journals.journal_of(journals.HISTORIES[history]())
    now = [journals.without_added_fields(line) for line in made]
    found: list[str] = []
    for number, (old, new) in enumerate(zip(before, now, strict=False), 1):
        if old != new:
            fields = [*journals.differences(json.loads(old), json.loads(new))]
            found += [f"line {number}, {_name(old)}: {each}" for each in fields or ["spelled differently"]]
    found += [
        f"line {number} is missing: {_name(each)}"
        for number, each in enumerate(before[len(now) :], len(now) + 1)
    ]
    found += [
        f"line {number} is new: {_name(each)}"
        for number, each in enumerate(now[len(before) :], len(before) + 1)
    ]
    more = [f"and {len(found) - MOST_SHOWN} more"] if len(found) > MOST_SHOWN else []
    assert not found, "\n" + "\n".join([*found[:MOST_SHOWN], *more])


def test_the_histories_contain_each_action_that_is_decided_now() -> None:
    lines = [json.loads(line) for journal in recorded().values() for line in journal]
    # Wait does nothing. Preserve occurs only on a cluster, the others only in journals of older versions.
    never = {"Wait", "Preserve", "Look", "Dismiss"}
    assert {line["action"] for line in lines} == {kind.__name__ for kind in get_args(RunAction)} - never


def test_a_difference_names_the_field() -> None:
    before = {"action": "Start", "after": {"skip": [1], "why": "a"}, "seen": 1}
    now = {"action": "Start", "after": {"skip": [2], "why": "a"}, "since": 1}
    assert [*journals.differences(before, now)] == [
        "line: fields action, after, seen -> action, after, since",
        "after.skip[0]: 1 -> 2",
    ]

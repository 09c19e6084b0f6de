from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from holdfast.checkpoint import catalog
from holdfast.checkpoint.catalog import verify
from holdfast.checkpoint.retention import Retention, retain
from holdfast.protocol.lineage import Lineage
from tests.crash.killing import killed_at_every_line
from tests.samples.checkpoints import (
    STATE,
    assert_whole,
    broken,
    latest,
    names,
    newest_whole,
    save,
    scan,
    steps,
)
from tests.sandbox import flip


@pytest.mark.parametrize("generation", [0, 1, 2])
def test_a_writer_killed_at_any_line_leaves_a_complete_newest_checkpoint(
    memory: Path, generation: int
) -> None:
    template = memory / "template"
    save(template, 1)
    if generation:
        save(template, 2, generation=generation - 1)
    before = (2, generation - 1) if generation else (1, 1)

    def check(work: Path, finished: bool) -> None:
        assert broken(work) == ()
        found, notes = newest_whole(work)
        assert found is not None
        assert_whole(found)
        assert notes == ()
        ages = [(2, generation)] if finished else [before, (2, generation)]
        assert (found.step, found.generation) in ages
        hint = latest(work)
        assert hint is not None
        if finished:
            assert catalog.load(work / hint).step == 2
        else:
            assert catalog.step_in(hint) in (1, 2)
        save(work, 3)
        retain(work, Retention(3))
        assert names(work) == {"latest", *(f"step-{step:08d}" for step in steps(work))}

    def act(work: Path) -> None:
        save(work, 2, generation)

    assert killed_at_every_line(template, lambda work: work, act, check) >= 10


def test_a_damaged_checkpoint_is_never_used_if_its_replacement_is_killed_at_any_line(
    memory: Path,
) -> None:
    template = memory / "template"
    save(template, 1)
    flip(save(template, 2) / STATE, 50)

    def check(work: Path, finished: bool) -> None:
        found, _ = newest_whole(work)
        assert found is not None
        assert_whole(found)
        assert found.step == 2 if finished else found.step in (1, 2)

    def act(work: Path) -> None:
        save(work, 2)

    killed_at_every_line(template, lambda work: work, act, check)


def test_a_replacement_killed_at_any_line_leaves_the_old_or_the_new_checkpoint(memory: Path) -> None:
    template = memory / "template"
    save(template, 2, 1)

    def check(work: Path, finished: bool) -> None:
        found, notes = newest_whole(work)
        assert found is not None
        assert_whole(found)
        assert notes == ()
        assert found.generation == 2 if finished else found.generation in (1, 2)
        save(work, 2, 3)
        assert_whole(scan(work)[0])
        assert scan(work)[0].generation == 3
        retain(work, Retention(2))
        assert names(work) == {"latest", "step-00000002"}

    def act(work: Path) -> None:
        save(work, 2, 2)

    assert killed_at_every_line(template, lambda work: work, act, check) >= 10


def test_a_deletion_killed_at_any_line_leaves_no_partial_checkpoint(memory: Path) -> None:
    template = memory / "template"
    for step in range(4):
        save(template, step)
    debris = template / ".tmp-gone-1-0-step-00000009"
    shutil.copytree(template / "step-00000003", debris)
    for path in (*debris.iterdir(), debris):
        os.utime(path, (1.0, 1.0))

    def check(work: Path, finished: bool) -> None:
        assert broken(work) == ()
        assert steps(work)[:2] == [3, 2]
        assert all(verify(found) is None for found in scan(work))
        retain(work, Retention(2))
        assert names(work) == {"latest", "step-00000002", "step-00000003"}

    def act(work: Path) -> None:
        retain(work, Retention(2))

    assert killed_at_every_line(template, lambda work: work, act, check) >= 8


def test_a_deletion_of_void_checkpoints_killed_at_any_line_deletes_no_valid_one(memory: Path) -> None:
    template, known = memory / "template", (Lineage(2, 70),)
    for step in (50, 60, 80, 90):
        save(template, step)
    save(template, 74, generation=2, known=known)

    def check(work: Path, finished: bool) -> None:
        assert broken(work) == ()
        assert {74, 60} <= set(steps(work))
        retain(work, Retention(1, proven=65))
        assert steps(work) == [74, 60]

    def act(work: Path) -> None:
        retain(work, Retention(1, known, 65))

    assert killed_at_every_line(template, lambda work: work, act, check) >= 8


def test_a_replacement_of_a_void_checkpoint_killed_at_any_line_leaves_the_old_or_the_new_one(
    memory: Path,
) -> None:
    template, known = memory / "template", (Lineage(2, 1),)
    save(template, 1)
    save(template, 2)

    def check(work: Path, finished: bool) -> None:
        assert broken(work) == ()
        assert all(verify(found) is None for found in scan(work))
        assert [(found.step, found.generation) for found in scan(work)] == [(2, 1 + finished), (1, 1)] or (
            not finished and scan(work)[0].generation == 2
        )

    def act(work: Path) -> None:
        save(work, 2, generation=2, known=known)

    assert killed_at_every_line(template, lambda work: work, act, check) >= 10

"""A group starts and resumes from the right state. A run ends rather than start over."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from holdfast.protocol.lineage import Lineage
from supervisor.decision import transition
from supervisor.decision.decide import decide
from supervisor.view import model
from supervisor.view.model import (
    Checkpoint,
    End,
    OpenIncident,
    Policy,
    RunAction,
    Secure,
    Start,
    StorageContents,
    UnusableCheckpoint,
    Wait,
)
from tests.simulation.cluster.scripts import TWO
from tests.unit.supervisor.job_views import S, fault, holding, launcher, member, rank, report, view


def begun(stored: StorageContents, now_s: float = 100.0, policy: Policy = TWO, **given: Any) -> RunAction:
    """Return the decision for two ready members, a run that began at 99 s, and this content of storage."""
    ready = [member(f"m{n}", report(f"m{n}", launcher(generation=0, parked=(0,)))) for n in range(2)]
    given = {
        "phase": "forming",
        "generation": 0,
        "since_ns": 99 * S,
        "placement": (),
        "launch": None,
        **given,
    }
    return decide(replace(view(*ready, now_s=now_s, **given), stored=stored), policy)


WHOLE, UNREAD = Checkpoint(9, 1, 2, "step-9", verified=True), Checkpoint(12, 1, 2, "step-12")


def test_a_start_waits_until_the_storage_was_read_and_then_ends() -> None:
    unknown = StorageContents(error="Stale file handle")
    waits = begun(unknown)
    assert isinstance(waits, Wait)
    assert waits.until_ns == (99 + 60) * S
    ended = begun(unknown, now_s=160.0)
    assert isinstance(ended, End)
    assert (ended.exit_code, "Stale file handle" in ended.why) == (2, True)


def test_a_start_waits_until_its_checkpoint_has_been_read_whole() -> None:
    assert isinstance(begun(StorageContents((UNREAD, WHOLE), looked_ns=1)), Wait)
    started = begun(StorageContents((WHOLE, replace(UNREAD, step=5)), looked_ns=1))
    assert isinstance(started, Start)
    assert started.resume.path == "step-9"
    late = begun(StorageContents((UNREAD, WHOLE), looked_ns=1), now_s=99.0 + TWO.form_s)
    assert isinstance(late, Start), "the members also read it"


def test_a_start_with_only_unusable_checkpoints_ends_the_run() -> None:
    cut = StorageContents((), (UnusableCheckpoint("step-9", 9, "manifest.json is cut short"),), looked_ns=1)
    ended = begun(cut)
    assert isinstance(ended, End)
    assert (ended.exit_code, "--from-scratch" in ended.why) == (2, True)
    void = begun(StorageContents((WHOLE,), looked_ns=1), lineage=(Lineage(2, 3),))
    assert isinstance(void, End)
    gone = begun(StorageContents(looked_ns=1), saved=9)
    assert isinstance(gone, End)


@pytest.mark.parametrize(
    "stored",
    [
        StorageContents(error="EIO"),
        StorageContents((UNREAD,)),
        StorageContents((), (UnusableCheckpoint("step-9", 9, "is cut short"),)),
        StorageContents(),
    ],
    ids=["away", "whole", "damaged", "empty"],
)
def test_starting_from_scratch_makes_existing_states_void(stored: StorageContents) -> None:
    policy = replace(TWO, from_scratch=True)
    known = replace(stored, generation=7)
    started = begun(known, policy=policy, seen=7)
    assert isinstance(started, Start)
    assert (started.resume.source, started.why) == (
        "none",
        "all members are ready: start from the beginning, as requested",
    )
    after = transition.after(
        replace(view(phase="forming", generation=0, seen=7), stored=known), started, policy
    )
    assert (after.generation, after.lineage) == (8, (Lineage(8, 0),))


def test_starting_from_scratch_applies_only_to_the_first_start() -> None:
    """A fault after the first checkpoint is no reason to start over."""
    policy = replace(TWO, from_scratch=True)
    held = [holding(f"m{n}", (), (), secured_for=1) for n in range(2)]
    seen = view(
        *held, phase="securing", since_ns=90 * S, incident=OpenIncident(1, 1, 0, 0, 0.0, (fault("crash"),))
    )
    started = decide(replace(seen, stored=StorageContents((WHOLE,), looked_ns=1)), policy)
    assert isinstance(started, Start)
    assert started.resume.path == "step-9"


def test_differing_replicas_without_storage_go_back_to_a_snapshot_or_the_run_reports_what_exists() -> None:
    incident = OpenIncident(1, 1, 0, 0, 0.0, (fault("diverged", -1, 500),))
    privates = tuple((rank, 1, step) for step in (500, 512) for rank in (0, 1))
    held = [holding(f"m{n}", ((1, 512), (1, 500)), privates, secured_for=1) for n in range(2)]
    seen = view(*held, phase="securing", since_ns=90 * S, incident=incident, held=512)
    started = decide(replace(seen, stored=StorageContents(looked_ns=1)), TWO)
    assert isinstance(started, Start)
    assert (started.resume.source, started.resume.step) == ("slot", 500)
    late = replace(incident, faults=(fault("diverged", -1, 256),))
    ended = decide(
        replace(seen, memory=replace(seen.memory, incident=late), stored=StorageContents(looked_ns=1)), TWO
    )
    assert isinstance(ended, End), "the run must not start from the beginning"
    assert ended.exit_code == 1
    assert "no checkpoint yet (--checkpoint-every)" in ended.why
    assert "the snapshot of step 500 on m0, m1: it is beyond step 256" in ended.why


def test_differing_replicas_lose_only_what_came_after_they_were_last_equal() -> None:
    """All snapshots and the newest checkpoints are beyond the last matching seal. An older one is not."""
    held = [
        holding(f"m{n}", ((1, 512), (1, 500)), ((0, 1, 512), (1, 1, 512)), secured_for=1) for n in range(2)
    ]
    incident = OpenIncident(1, 1, 0, 0, 0.0, (fault("diverged", -1, 256),))
    kept = tuple(Checkpoint(step, 1, 2, f"step-{step}", verified=True) for step in (448, 384, 256))
    seen = view(*held, phase="securing", since_ns=90 * S, incident=incident, saved=448, held=512)
    started = decide(replace(seen, stored=StorageContents(kept, looked_ns=1)), TWO)
    assert isinstance(started, Start)
    assert started.resume.path == "step-256"
    newer = StorageContents(kept[:2], looked_ns=1)
    ended = decide(replace(seen, stored=newer), TWO)
    assert isinstance(ended, End)
    assert (ended.exit_code, "checkpoint step-384: it is beyond step 256" in ended.why) == (1, True)
    after = transition.after(replace(seen, stored=newer), ended, TWO)
    assert after.lineage == (Lineage(2, 256),), "the next run in the directory must not use them either"
    assert after.seen == 2


def test_unresponsive_storage_is_named_at_the_end() -> None:
    def late(error: str) -> RunAction:
        return begun(StorageContents(error=error), now_s=99.0 + TWO.storage_s)

    assert late(model.UNREAD) == End(2, "storage could not be read for 60 s: it does not respond")
    assert late("EIO") == End(2, "storage could not be read for 60 s: EIO")


def test_a_wait_for_a_newer_state_names_the_members() -> None:
    incident = OpenIncident(1, 1, 0, 0, 0.0, (fault("crash"),))
    held = holding("m0", ((1, 5),), ((0, 1, 5), (1, 1, 5)), secured_for=1)
    other = holding("m2", (), (), secured_for=1)
    seen = view(held, other, phase="securing", since_ns=90 * S, incident=incident, reached=9, held=5)
    away = replace(seen, stored=StorageContents(error="EIO"))
    found = decide(replace(away, now_ns=91 * S), TWO)
    assert found == Wait(95 * S, "step 5 is old, and storage may have a newer state")


def test_a_wait_for_the_cause_of_victims_ends() -> None:
    policy = replace(TWO, victim_s=15.0)
    incident = OpenIncident(1, 1, 0, 0, 0.0, (fault("victim"),))
    held = [holding(f"m{n}", ((1, 5),), ((n, 1, 5),), secured_for=1) for n in range(2)]
    seen = view(*held, phase="securing", since_ns=90 * S, incident=incident)
    waits = Wait(105 * S, "only victims so far: waiting for the cause")
    assert decide(seen, policy) == waits
    assert decide(replace(seen, now_ns=105 * S), policy) != waits


@pytest.mark.parametrize(("claims", "placement"), [((0,), ("m0", "m1")), ((0, 1), ("m4", "m5"))])
def test_a_placement_is_followed_only_if_all_ranks_are_claimed(
    claims: tuple[int, ...], placement: tuple[str, ...]
) -> None:
    ranks = [
        member(f"m{n + 4}", report(f"m{n + 4}", launcher(rank(n, generation=3), generation=3)))
        for n in claims
    ]
    seen = view(*ranks)
    lost = fault("lost_track", -1)
    after = transition.after(seen, Secure((lost,), True, "lost track"), TWO)
    assert (after.generation, after.placement, after.reached) == (3, placement, -1)

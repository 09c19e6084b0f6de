"""A job's storage is known from its members' listings. The newest one counts; a failure clears nothing."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from holdfast.process import event_loop
from holdfast.protocol.lineage import Lineage
from holdfast.protocol.member_messages import (
    CheckpointReport,
    ListedCheckpoint,
    MemberReport,
    RefusedCheckpoint,
    StorageListing,
)
from supervisor.controller import reported_storage
from supervisor.controller.records import CheckpointSource
from supervisor.controller.reported_storage import ReportedStorage
from supervisor.view.model import UNREAD, Checkpoint, UnusableCheckpoint
from tests.unit.supervisor.job_views import report


def listed(step: int, created: float = 0.0) -> ListedCheckpoint:
    return ListedCheckpoint(f"step-{step:08d}", step, 1, 2, created or float(step))


def listing(*steps: int, number: int = 1, asked: int = 0, error: str = "") -> StorageListing:
    made = StorageListing(number, tuple(listed(step) for step in steps), asked=asked, error=error)
    return replace(made, lineage=(Lineage(1, -1),), generation=1, epoch=3)


class Members:
    """Members, each of which reports its own entry of `listings`."""

    def __init__(self, *listings: StorageListing | None) -> None:
        self.listings = listings
        self.storage = ReportedStorage(self.reports, lambda: None)

    def reports(self) -> list[MemberReport]:
        return [report(f"m{n}", None, storage=each) for n, each in enumerate(self.listings)]

    def say(self, *listings: StorageListing | None) -> bool:
        """Report new listings. Return True if they change anything."""
        self.listings = listings
        return self.storage._update()

    @property
    def steps(self) -> list[int]:
        return [each.step for each in self.storage.stored.checkpoints]


def test_checkpoints_in_the_pods_own_volumes_do_not_count() -> None:
    said = replace(listing(3), refused=(RefusedCheckpoint("step-00000001", 1, "torn"),))
    storage = ReportedStorage(lambda: [report("m0", None, storage=said)], lambda: None, is_durable=False)
    assert storage._update()
    assert (storage.stored.checkpoints, storage.stored.unusable, storage.stored.error) == ((), (), "")


def test_storage_that_no_member_has_listed_counts_as_unread() -> None:
    members = Members()
    for said in ((), (None,), (StorageListing(error=UNREAD),), (StorageListing(),)):
        assert not members.say(*said)
        assert members.storage.stored.error == UNREAD, "an empty error would mean that it was read"
    assert members.storage.stored.failed_ns > 0


def test_a_listing_contains_everything_that_the_decision_needs() -> None:
    members = Members()
    refused = (RefusedCheckpoint("step-00000009", 9, "it is damaged"),)
    said = replace(listing(8, 4, asked=2), refused=refused)
    assert members.say(said)
    found = members.storage.stored
    assert found.checkpoints == (
        Checkpoint(8, 1, 2, "step-00000008", verified=True),
        Checkpoint(4, 1, 2, "step-00000004", verified=True),
    )
    assert found.unusable == (UnusableCheckpoint("step-00000009", 9, "it is damaged"),)
    assert (found.lineage, found.generation, found.epoch) == (said.lineage, 1, 3)
    assert (found.heard, found.error) == (2, "")
    assert found.looked_ns > 0


def test_a_repeated_listing_changes_nothing() -> None:
    members = Members()
    assert members.say(listing(4), None)
    assert not members.say(listing(4))
    assert members.say(listing(4, number=2))


@pytest.mark.parametrize("turned", [False, True])
def test_the_listing_with_the_newest_checkpoint_counts(turned: bool) -> None:
    said = [listing(8, 4, number=1), listing(4, number=90), listing(number=7)]
    members = Members()
    members.say(*(reversed(said) if turned else said))
    assert members.steps == [8, 4]


def test_a_checkpoint_that_was_removed_is_gone_once_the_newest_listing_lacks_it() -> None:
    members = Members()
    members.say(listing(8, 4), listing(8, 4))
    members.say(listing(8, number=2), listing(8, 4))
    assert members.steps == [8]


def test_a_run_that_started_over_at_a_lower_step_has_its_newest_checkpoint_there() -> None:
    members = Members()
    after = replace(listing(), checkpoints=(listed(3, created=100.0), listed(9, created=50.0)))
    members.say(after, replace(listing(), checkpoints=(listed(9, created=50.0),), number=99))
    assert members.steps == [3, 9]


@pytest.mark.parametrize("turned", [False, True])
def test_an_order_counts_as_answered_only_in_a_listing_that_began_after_the_answer(turned: bool) -> None:
    """The clock of the member that saved is behind, and another member lists a newer checkpoint."""
    saved = replace(listing(asked=3), checkpoints=(listed(100, created=990.0), listed(90, created=1_000.0)))
    stale = replace(listing(number=40), checkpoints=(listed(90, created=1_000.0),))
    members = Members()
    members.say(*((stale, saved) if turned else (saved, stale)))
    found = members.storage.stored
    assert found.heard == 0 or 100 in members.steps, "the checkpoint would count as one that has vanished"
    fresh = replace(saved, number=41, asked=0)
    members.say(*((fresh, saved) if turned else (saved, fresh)))
    assert (members.storage.stored.heard, members.steps) == (3, [100, 90])


def test_members_with_the_same_storage_answer_for_the_one_that_saved() -> None:
    members = Members()
    members.say(listing(8, number=50), listing(8, number=2, asked=3))
    assert members.storage.stored.heard == 3


def test_a_failure_keeps_the_last_listing_and_its_start_time() -> None:
    members = Members()
    members.say(listing(8))
    assert members.say(listing(8, number=2, error="EIO"))
    first = members.storage.stored
    assert (first.error, members.steps) == ("EIO", [8])
    assert not members.say(listing(8, number=3, error="EIO"))
    assert members.say(listing(8, number=4, error="ESTALE"))
    assert members.storage.stored.failed_ns == first.failed_ns
    assert members.say(listing(8, number=5))
    assert (members.storage.stored.error, members.steps) == ("", [8])


def test_storage_is_read_as_long_as_one_member_reads_it() -> None:
    members = Members()
    members.say(listing(error="EIO"), listing(4), None)
    assert (members.storage.stored.error, members.steps) == ("", [4])


def test_storage_that_no_member_reports_any_more_counts_as_unread() -> None:
    members = Members()
    members.say(listing(4))
    assert members.say()
    assert (members.storage.stored.error, members.steps) == (UNREAD, [4])


@pytest.mark.parametrize("before", [(), (listing(4),), (listing(4, error="EIO"),)])
def test_the_time_that_storage_may_fail_begins_when_a_member_first_lists_it(
    before: tuple[StorageListing, ...],
) -> None:
    """Pods may be pending for hours. The job must not end because nobody has read its storage yet."""
    members = Members()
    members.say(*before)
    members.say()
    begun = members.storage.stored.failed_ns
    assert not members.say(), "the decision need not be made again"
    waiting = members.storage.stored.failed_ns
    assert waiting > begun
    members.say(listing(error=UNREAD))
    members.say(listing(error="EIO"))
    assert members.storage.stored.failed_ns == waiting


async def test_a_change_is_reported_as_soon_as_it_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round of the job, and therefore a report, is enough. Without one, storage is polled."""
    for poll_s in (0.001, 600.0):
        monkeypatch.setattr(reported_storage, "POLL_S", poll_s)
        await follow(Members(listing(4)), is_reported=poll_s > 1)


async def follow(members: Members, is_reported: bool) -> None:
    changed = asyncio.Event()
    members.storage = ReportedStorage(members.reports, changed.set)
    running = asyncio.create_task(members.storage.run())
    for step in (4, 5):
        members.listings = (listing(step),)
        if is_reported:
            members.storage.on_report(CheckpointReport())
        await asyncio.wait_for(changed.wait(), 20)
        changed.clear()
        assert members.steps == [step]
    await event_loop.end([running])


def test_the_reported_storage_is_a_checkpoint_index_that_ignores_requests() -> None:
    index: CheckpointSource = Members(listing(4)).storage
    before = index.stored
    index.request_rescan()
    index.on_report(CheckpointReport(8))
    index.doubt()
    index.verify(None)
    assert index.stored is before

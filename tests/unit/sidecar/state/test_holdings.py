from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.protocol.member_messages import HeldPrivateState, HeldSnapshot
from holdfast.snapshot.private_store import PrivateStore
from sidecar.state.holdings import NEWEST
from tests.sandbox import in_child, limit_file_size
from tests.unit.sidecar.memory import flip, holdings, member, private, snapshot


@pytest.fixture
def here() -> Iterator[Path]:
    with member() as path:
        yield path


def test_an_empty_memory_holds_nothing(here: Path) -> None:
    held = holdings(here)
    assert (held.slots(), held.privates(), held.record(1, 1), held.private(0, 1, 1)) == ((), (), None, None)


def test_snapshots_and_private_states_are_listed(here: Path) -> None:
    record = snapshot(here, 1, 5)
    private(here, 0, 1, 5, b"zero")
    private(here, 1, 1, 5, b"one", kept=True)
    held = holdings(here)
    assert held.slots() == (HeldSnapshot(1, 5, record.total_bytes),)
    assert set(held.privates()) == {HeldPrivateState(0, 1, 5, True), HeldPrivateState(1, 1, 5, True)}
    found = held.private(1, 1, 5)
    assert found is not None
    assert found.data == b"one"
    assert held.private(1, 2, 5) is None


def test_the_newest_private_states_and_those_of_snapshots_are_listed(here: Path) -> None:
    snapshot(here, 1, 16)
    store = PrivateStore(here / "arena" / "private-00000.bin", 0)
    for step in range(200):
        store.put(1, step, b"x")
    store.close()
    steps = {each.step for each in holdings(here).privates()}
    assert {199, 198, 197} <= steps
    assert 16 not in steps  # 64, 128 and 192 have taken its place, so the snapshot is useless
    assert len(steps) <= NEWEST + 1


def test_a_final_private_state_takes_precedence_over_one_that_may_change(here: Path) -> None:
    own = PrivateStore(here / "arena" / "private-00000.bin", 0)
    own.put(1, 5, b"early", final=False)
    own.close()
    private(here, 0, 1, 5, b"final", kept=True)
    held = holdings(here)
    assert held.privates() == (HeldPrivateState(0, 1, 5, True),)
    found = held.private(0, 1, 5)
    assert found is not None
    assert found.data == b"final"


def test_a_private_state_that_may_have_changed_is_sent_to_no_peer(here: Path) -> None:
    own = PrivateStore(here / "arena" / "private-00000.bin", 0)
    own.put(1, 5, b"early", final=False)
    own.close()
    held = holdings(here)
    assert held.privates() == (HeldPrivateState(0, 1, 5, False),)
    assert held.private(0, 1, 5) is None


def test_the_state_from_which_a_rank_was_started_is_also_held(here: Path) -> None:
    held = holdings(here)
    path = held.keep_restored(3, 1, 5, b"restored")
    assert path.read_bytes() == b"restored"
    found = held.private(3, 1, 5)
    assert found is not None
    assert found.data == b"restored"
    assert held.privates() == ()  # it belongs to no snapshot
    snapshot(here, 1, 5)
    assert held.privates() == (HeldPrivateState(3, 1, 5, True),)


@pytest.mark.parametrize("content", [b"", b"restore", b"restorex"])
def test_a_truncated_start_state_is_ignored(here: Path, content: bytes) -> None:
    held = holdings(here)
    path = held.keep_restored(3, 1, 5, b"restored")
    path.write_bytes(content)
    assert held.private(3, 1, 5) is None
    assert not path.exists()


def test_without_space_a_private_state_is_omitted_rather_than_stored_in_part(here: Path) -> None:
    held = holdings(here)

    def child() -> None:
        limit_file_size(1000)
        with pytest.raises(OSError, match="large"):
            held.keep_restored(3, 1, 5, bytes(2000))

    assert in_child(child) == 0
    assert held.private(3, 1, 5) is None
    assert list((here / "restore").iterdir()) == []


def test_a_file_that_already_exists_takes_no_space_twice(here: Path) -> None:
    held = holdings(here)
    path = held.keep_restored(3, 1, 5, b"restored")
    before = path.stat().st_ino
    assert held.keep_restored(3, 1, 5, b"restored") == path
    assert path.stat().st_ino == before
    path.write_bytes(b"restoreX")
    held.keep_restored(3, 1, 5, b"restored")
    assert path.read_bytes() == b"restored"


def test_only_start_states_that_a_start_may_need_are_kept(here: Path) -> None:
    snapshot(here, 3, 7)
    held = holdings(here)
    for generation, step in ((1, 5), (1, 7), (3, 7), (4, 9)):
        held.keep_restored(0, generation, step, b"%d/%d" % (generation, step))
    (here / "restore" / ".00000-00000001-000000000003.tmp").write_bytes(b"half")
    held.forget_restored(frozenset({(0, 4, 9)}))
    assert sorted(each.name[6:27] for each in (here / "restore").iterdir()) == [
        "00000003-000000000007",
        "00000004-000000000009",
    ]


def test_the_state_of_the_step_from_which_the_group_resumes_is_kept_for_other_members(here: Path) -> None:
    """The snapshot of the step is not here yet, and another member may be about to fetch the rank's state."""
    held = holdings(here)
    for rank, step in ((0, 5), (0, 7), (3, 7)):
        held.keep_restored(rank, 1, step, b"%d" % rank)
    held.forget_restored(frozenset(), resumed_step=7)
    kept = {each.name[:5] for each in (here / "restore").iterdir()}
    assert (kept, len(list((here / "restore").iterdir()))) == ({"00000", "00003"}, 2)


def test_foreign_files_in_the_memory_are_not_touched(here: Path) -> None:
    for name in ("private-1.bin", "private-00001.bin.new", "notes.txt"):
        (here / "arena" / name).write_bytes(b"?")
    (here / "arena" / "private-00002.bin").write_bytes(b"no store")
    assert holdings(here).privates() == ()


def test_a_snapshot_is_intact_while_it_equals_its_sealed_content(here: Path) -> None:
    record = snapshot(here, 1, 5)
    held = holdings(here)
    assert held.good(record)
    held.arena.seal(record)
    assert held.good(record)
    flip(record)
    assert not held.good(record)


def test_an_overwritten_snapshot_is_not_intact(here: Path) -> None:
    record = snapshot(here, 1, 5)
    held = holdings(here)
    held.arena.seal(record)
    for step in (6, 7):
        snapshot(here, 1, step)
    assert held.record(1, 5) is None
    assert held.good(held.arena.records()[0])
    held.arena.forget(held.arena.records()[0])
    assert [slot.step for slot in held.slots()] == [6]
    held.arena.forget(record)  # nothing of it is left
    assert [slot.step for slot in held.slots()] == [6]


def test_a_state_to_start_from_is_not_written_through_a_link(here: Path, tmp_path: Path) -> None:
    """A pod's script may create any link there, and the sidecar may have rights that the script lacks."""
    (tmp_path / "checkpoint").write_bytes(b"intact")
    held = holdings(here)
    kept = held.keep_restored(0, 1, 5, b"state")
    kept.unlink()
    partial = kept.with_name(f".{kept.name.rpartition('-')[0]}.tmp")
    partial.symlink_to(tmp_path / "checkpoint")
    assert held.keep_restored(0, 1, 5, b"state").read_bytes() == b"state"
    assert (tmp_path / "checkpoint").read_bytes() == b"intact"

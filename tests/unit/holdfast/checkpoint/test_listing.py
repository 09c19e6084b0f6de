"""The listing of checkpoints for a supervisor that cannot read the storage."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint import manifest
from holdfast.checkpoint.catalog import MANIFEST
from holdfast.checkpoint.listing import PATIENCE, ListingReader, step_of
from holdfast.protocol import codec
from holdfast.protocol.lineage import Lineage
from holdfast.protocol.member_messages import MAX_SKIPPED, ListedCheckpoint, StorageListing
from tests.samples.checkpoints import STATE, save
from tests.sandbox import flip, memory_directory


def read(root: Path, most: int = 64) -> StorageListing:
    return ListingReader(root, most).read()


def unreadable(root: Path, step: int) -> Path:
    """Create a checkpoint whose manifest cannot be read, although it may be intact."""
    found = root / f"step-{step:08d}"
    found.mkdir()
    (found / MANIFEST).symlink_to("elsewhere")
    return found


def with_meta(path: Path, meta: dict[str, Any]) -> None:
    """Write the manifest again, with other values from the trainer."""
    found = manifest.unpack((path / MANIFEST).read_bytes())
    (path / MANIFEST).write_bytes(manifest.pack(replace(found, meta=meta)))


def test_a_missing_or_empty_folder_has_no_checkpoints(tmp_path: Path) -> None:
    assert read(tmp_path) == read(tmp_path / "missing") == StorageListing()


def test_checkpoints_are_listed_newest_first_with_data_from_their_manifests(tmp_path: Path) -> None:
    save(tmp_path, 12, generation=3, known=(Lineage(3, 5),), epoch=2)
    save(tmp_path, 5, generation=1, epoch=4)
    found = read(tmp_path)
    assert found.checkpoints == (
        ListedCheckpoint("step-00000012", 12, 3, 2, 1012.0),
        ListedCheckpoint("step-00000005", 5, 1, 2, 1005.0),
    )
    assert (found.lineage, found.generation, found.epoch) == ((Lineage(3, 5),), 3, 4)
    assert (found.number, found.error, found.asked) == (0, "", 0)


def test_a_generation_that_occurs_only_in_a_lineage_is_known(tmp_path: Path) -> None:
    save(tmp_path, 5, generation=1, known=(Lineage(9, 5),))
    assert read(tmp_path).generation == 9


def test_only_the_newest_manifests_are_read(tmp_path: Path) -> None:
    for step in range(6):
        save(tmp_path, step)
    assert [each.step for each in read(tmp_path, 3).checkpoints] == [5, 4, 3]


def test_a_damaged_checkpoint_is_refused_with_the_reason(tmp_path: Path) -> None:
    save(tmp_path, 5)
    flip(save(tmp_path, 7) / MANIFEST, 9)
    (save(tmp_path, 9) / STATE).unlink()
    found = read(tmp_path)
    assert [each.step for each in found.checkpoints] == [5]
    assert [(each.name, each.step) for each in found.refused] == [("step-00000009", 9), ("step-00000007", 7)]
    assert found.refused[0].why == f"{STATE} is missing"


def test_an_unreadable_manifest_counts_as_damaged_only_after_several_attempts(tmp_path: Path) -> None:
    """Storage may fail for a while. Without the newest checkpoint, training would go back needlessly."""
    save(tmp_path, 5)
    unreadable(tmp_path, 7)
    reader = ListingReader(tmp_path, 64)
    for _ in range(PATIENCE - 1):
        with pytest.raises(OSError, match="checkpoint step-00000007: "):
            reader.read()
    found = reader.read()
    assert [each.step for each in found.checkpoints] == [5]
    assert [each.name for each in found.refused] == ["step-00000007"]


@pytest.mark.parametrize(
    ("skip", "expected"),
    [
        ([3, 4], (3, 4)),
        (None, ()),
        ("34", ()),
        ([3, "4", None, 5.0, True], (3,)),
        ([-1, 7, 1 << 63, 99_999_999_999_999_999_999], (7,)),
    ],
)
def test_steps_to_skip_are_numbers_that_a_report_may_contain(
    tmp_path: Path, skip: object, expected: tuple[int, ...]
) -> None:
    """A report with another number would be refused as a whole, and its member would count as lost."""
    with_meta(save(tmp_path, 5), {"skip": skip})
    found = read(tmp_path)
    assert found.checkpoints[0].skip == expected
    assert codec.decode(StorageListing, codec.encode(found)) == found


def test_only_the_highest_steps_to_skip_are_listed(tmp_path: Path) -> None:
    with_meta(save(tmp_path, 5), {"skip": list(range(2 * MAX_SKIPPED))})
    found = read(tmp_path)
    assert found.checkpoints[0].skip == tuple(range(MAX_SKIPPED, 2 * MAX_SKIPPED))
    assert codec.decode(StorageListing, codec.encode(found)) == found


_NUMBERS = st.integers(-(10**20) + 1, 10**20 - 1) | st.booleans() | st.floats(allow_nan=False)


@given(st.lists(_NUMBERS | st.none() | st.text(), max_size=5))
def test_any_checkpoint_gives_a_listing_that_a_report_may_contain(skip: list[object]) -> None:
    with memory_directory() as root:
        try:
            with_meta(save(root, 5), {"skip": skip})
        except ValueError:  # infinite, or not text that JSON can hold
            return
        found = read(root)
        assert codec.decode(StorageListing, codec.encode(found)) == found


@pytest.mark.parametrize(("name", "step"), [("step-00000012", 12), ("step-00000012.old", 12), ("other", -1)])
def test_the_step_is_read_from_the_name(name: str, step: int) -> None:
    assert step_of(name) == step

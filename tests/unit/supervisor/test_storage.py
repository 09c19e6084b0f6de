from __future__ import annotations

from pathlib import Path

import pytest

from holdfast import checkpoint
from holdfast.lineage import Lineage
from holdfast.messages import Durable
from supervisor.storage import Storage


def write(root: Path, step: int, generation: int = 1, skip: tuple[object, ...] = ()) -> Durable:
    path = checkpoint.write(
        root,
        generation=generation,
        step=step,
        world_size=2,
        files={"replicated.safetensors": b"x" * 100},
        meta={"skip": list(skip)},
        created_at=0.0,
    )
    return Durable(step, generation, str(path))


def damage(durable: Durable) -> None:
    path = Path(durable.path) / "replicated.safetensors"
    content = bytearray(path.read_bytes())
    content[50] ^= 1
    path.write_bytes(content)


def step_of(storage: Storage) -> int | None:
    return storage.found.step if storage.found else None


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return Storage(tmp_path)


async def test_the_newest_whole_checkpoint_is_found_with_what_it_passed_over(
    tmp_path: Path, storage: Storage
) -> None:
    await storage.look(())
    assert storage.found is None
    write(tmp_path, 3, skip=(2, "x"))
    damage(write(tmp_path, 5))
    await storage.look(())
    assert storage.found is not None
    assert (storage.found.step, storage.found.world_size, storage.found.skip) == (3, 2, (2,))
    [note] = storage.found.notes
    assert "step-00000005 is not used: replicated.safetensors is damaged" in note


async def test_a_checkpoint_without_manifest_is_passed_over(tmp_path: Path, storage: Storage) -> None:
    write(tmp_path, 3)
    (tmp_path / "step-00000009").mkdir()
    await storage.look(())
    assert step_of(storage) == 3


async def test_what_members_write_is_followed_forwards_only(tmp_path: Path, storage: Storage) -> None:
    for step, expected in ((3, 3), (6, 6), (5, 6)):
        storage.heard(write(tmp_path, step))
        assert step_of(storage) == expected
    storage.heard(write(tmp_path, 4, generation=2))
    assert step_of(storage) == 4  # a newer generation went on from before


async def test_what_was_found_damaged_is_not_believed_again(tmp_path: Path, storage: Storage) -> None:
    write(tmp_path, 3)
    told = write(tmp_path, 5)
    storage.heard(told)
    damage(told)
    await storage.look(())
    storage.heard(told)
    assert step_of(storage) == 3


async def test_what_a_later_generation_made_void_is_passed_over(tmp_path: Path, storage: Storage) -> None:
    write(tmp_path, 3)
    write(tmp_path, 8)
    await storage.look((Lineage(2, 4),))
    assert step_of(storage) == 3


async def test_what_cannot_be_read_is_not_taken(tmp_path: Path, storage: Storage) -> None:
    storage.heard(Durable())
    storage.heard(Durable(7, 1, str(tmp_path / "step-00000007")))
    assert storage.found is None


async def test_storage_that_is_away_leaves_what_is_known(tmp_path: Path) -> None:
    write(tmp_path / "here", 3)
    storage = Storage(tmp_path / "here")
    await storage.look(())
    (tmp_path / "here").rename(tmp_path / "there")
    (tmp_path / "here").symlink_to("here")
    await storage.look(())
    assert step_of(storage) == 3

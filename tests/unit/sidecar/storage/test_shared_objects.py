"""Members that write the objects of one checkpoint together."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint import sharing
from holdfast.checkpoint.catalog import StoredCheckpoint
from holdfast.checkpoint.manifest import REPLICATED
from holdfast.checkpoint.retention import Retention, retain
from holdfast.fileio.checksum import CHUNK_BYTES, chunk_crcs
from sidecar.state.piece_writer import PieceRequest
from sidecar.storage import transfers
from sidecar.storage.object_storage import ObjectStorage
from tests.s3server.server import Fault, Hang, ObjectServer, Refusal, Request, serving
from tests.unit.sidecar.memory import holdings, member
from tests.unit.sidecar.sharing.group import (
    GENERATION,
    NEWEST,
    STEP,
    helper,
    hold,
    post,
    saved,
    small_states_pay,
    until,
)
from tests.unit.sidecar.storage.checkpoints import PREFIX, defects, folder, save
from tests.unit.sidecar.storage.conftest import LOCATION, storage_at

NAME = f"step-{STEP:08d}"


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    small_states_pay(monkeypatch)
    monkeypatch.setattr(transfers, "PARTS", 1)  # so that the peers have the time to take pieces, too
    with member() as path:
        hold(path)
        yield path


def content(storage: ObjectStorage, here: Path, copies: Path) -> StoredCheckpoint:
    """Return the checkpoint, which is the one that a single writer makes."""
    assert defects(storage) == []
    found = storage.load(NAME)
    assert storage.content_fault(found) is None
    path, fault = storage.local_copy(found, [REPLICATED], lambda: None)
    assert fault is None
    (record,) = holdings(here).arena.records()
    assert (path / REPLICATED).read_bytes() == record.path.read_bytes()
    storage.forget_copies()
    return found


async def test_several_members_write_the_checkpoint_that_one_writes(
    here: Path, any_url: str, tmp_path: Path
) -> None:
    def at(prefix: str) -> ObjectStorage:
        return storage_at(any_url, tmp_path / "copies", location=replace(LOCATION, prefix=prefix))

    assert (await saved(here, at("alone"))).durable.error == ""
    together = at("together")
    async with helper(at("together")) as one, helper(at("together"), "n2") as other:
        assert (await saved(here, together, one.url, other.url)).durable.error == ""
        assert one.pieces.written > 0
        assert other.pieces.written > 0
    found = content(together, here, tmp_path)
    assert found.files == content(at("alone"), here, tmp_path).files
    assert found.objects is not None
    keys = {each.key for each in together._client.objects(f"together/{NAME}", 1000)}
    parts = {f"{REPLICATED}/{number:05d}" for number in range(6)}
    rest = {f"rank-0000{rank}.bin/00000" for rank in (0, 1)}
    own = f"together/{NAME}/{found.objects.folder}"
    assert keys == {f"together/{NAME}/manifest.json", *(f"{own}/{each}" for each in parts | rest)}


async def test_a_replica_that_differs_never_gets_into_a_checkpoint(
    here: Path, storage: ObjectStorage, server: ObjectServer, tmp_path: Path
) -> None:
    async with helper(storage_at(server.url, tmp_path), flipped=1) as peer:
        assert (await saved(here, storage, peer.url)).durable.error == ""
        assert peer.pieces.asked > 0
    content(storage, here, tmp_path)


async def test_a_peer_with_another_bucket_is_not_used(
    here: Path, storage: ObjectStorage, server: ObjectServer, tmp_path: Path
) -> None:
    server.buckets["other"] = {}
    other = storage_at(server.url, tmp_path, location=replace(LOCATION, bucket="other"))
    async with helper(other) as peer:
        assert (await saved(here, storage, peer.url)).durable.error == ""
        assert (peer.pieces.asked > 0, peer.pieces.written) == (True, 0)
    assert server.stored("other") == []
    content(storage, here, tmp_path)


async def test_a_peer_whose_requests_fail_is_not_used(
    here: Path, storage: ObjectStorage, tmp_path: Path
) -> None:
    with serving(tmp_path / "others") as broken:
        broken.interfere = lambda _: Refusal(403, "AccessDenied")
        async with helper(storage_at(broken.url, tmp_path)) as peer:
            assert (await saved(here, storage, peer.url)).durable.error == ""
            assert (peer.pieces.asked > 0, peer.pieces.written) == (True, 0)
    content(storage, here, tmp_path)


async def test_an_object_that_arrives_after_the_checkpoint_was_published_changes_nothing(
    here: Path, storage: ObjectStorage, server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "LATE_S", 0.2)
    held: list[str] = []
    go_on, arrived = threading.Event(), threading.Event()

    late = storage_at(server.url, tmp_path)
    write = late._client.write

    def write_late(key: str, data: bytes) -> None:
        held.append(key)
        assert go_on.wait(30.0)
        write(key, data)
        arrived.set()

    monkeypatch.setattr(late._client, "write", write_late)
    async with helper(late) as peer:
        assert (await saved(here, storage, peer.url)).durable.error == ""
        content(storage, here, tmp_path)
        before = server.stored()
        go_on.set()
        assert arrived.wait(10.0)
        await until(lambda: not peer.pieces._active)
    assert held != []
    assert server.stored() == before
    content(storage, here, tmp_path)


async def test_an_object_that_arrives_after_the_checkpoint_was_given_up_is_removed_later(
    here: Path, storage: ObjectStorage, server: ObjectServer, tmp_path: Path
) -> None:
    server.ages_s = 7200.0  # written two hours ago
    server.put(f"{PREFIX}/{NAME}/e3-g2-0123456789abcdef/{REPLICATED}/00001", b"late")
    server.ages_s = 0.0
    newest = save(storage, 8, epoch=3)
    retain(storage, Retention(1, epoch=3), frozenset({newest}))
    assert [key for key in server.stored() if NAME in key] == []


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"folder": ".."}, "is not named like a writer's folder"),
        ({"folder": f"../step-00000001/e3-g2-{'0' * 16}"}, "is not named like a writer's folder"),
        ({"folder": ""}, "is not named like a writer's folder"),
        ({"folder": f"e3-g2-{'1' * 16}"}, "does not see the writer's folder"),
        ({"token": "1" * 64}, "does not see the writer's folder"),
        ({"token": ""}, "does not see the writer's folder"),
        ({"part_bytes": 0}, "not one of the file's objects"),
        ({"part_bytes": 4096}, "not one of the file's objects"),
        ({"part_bytes": 1 << 40}, "not one of the file's objects"),
        ({"part_bytes": 2 * CHUNK_BYTES}, "not one of the file's objects"),
    ],
)
async def test_a_request_that_is_not_right_in_any_point_is_refused(
    here: Path, storage: ObjectStorage, server: ObjectServer, change: dict[str, Any], why: str
) -> None:
    (record,) = holdings(here).arena.records()
    own = f"e3-g2-{'0' * 16}"
    token = sharing.new_token()
    server.put(f"{PREFIX}/{NAME}/{own}/{sharing.TOKEN}", token.encode())
    crcs = chunk_crcs(memoryview(record.path.read_bytes())[:CHUNK_BYTES])
    right = PieceRequest(
        NEWEST.epoch, GENERATION, "n0", record.total_bytes, 0, CHUNK_BYTES, own, token, CHUNK_BYTES, crcs
    )
    before = server.stored()
    async with helper(storage, path=here) as peer:
        status, text = await post(peer.url, replace(right, **change))
        assert (status, why in text) == (409, True), text
        assert server.stored() == before
        assert (await post(peer.url, right))[0] == 200
    assert server.stored() == sorted([*before, f"{PREFIX}/{NAME}/{own}/{REPLICATED}/00000"])


async def test_a_peer_whose_storage_hangs_delays_a_checkpoint_for_a_bounded_time(
    here: Path, storage: ObjectStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "LATE_S", 0.2)
    hanging = Hang()

    def interfere(_: Request) -> Fault | None:
        return hanging

    with serving(tmp_path / "others") as hung:
        hung.interfere = interfere
        async with helper(storage_at(hung.url, tmp_path)) as peer:
            began_s = time.monotonic()
            assert (await saved(here, storage, peer.url)).durable.error == ""
            assert time.monotonic() - began_s < 10.0
            hanging.end.set()
    assert folder(storage, STEP).startswith(f"{PREFIX}/{NAME}/e0-g2-")
    content(storage, here, tmp_path)

"""Checkpoints in object storage are written, listed, copied and deleted on real S3 servers."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.checkpoint import writer
from holdfast.checkpoint.catalog import StoredCheckpoint
from holdfast.checkpoint.manifest import InvalidCheckpoint
from holdfast.checkpoint.retention import Retention, retain
from holdfast.fileio.checksum import CHUNK_BYTES
from holdfast.fileio.durable import DEBRIS_AGE_S
from holdfast.protocol.lineage import Lineage
from sidecar.storage import object_storage, transfers
from sidecar.storage.object_client import ObjectStoreError
from sidecar.storage.object_storage import ObjectStorage
from tests.s3server.server import Cut, Fault, ObjectServer, Refusal, Request
from tests.unit.sidecar.storage.checkpoints import (
    PREFIX,
    PRIVATE,
    STATE,
    defects,
    folder,
    save,
    state,
    steps,
)
from tests.unit.sidecar.storage.conftest import storage_at

MANIFEST = "manifest.json"


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_storage, "PUBLISH_PAUSES_S", (0.001, 0.001))


def copied(storage: ObjectStorage, step: int, *names: str) -> tuple[Path, str | None]:
    return storage.local_copy(storage.load(f"step-{step:08d}"), names or (STATE, PRIVATE), lambda: None)


# -- on both servers


def test_a_written_checkpoint_is_listed_verified_and_copied(any_url: str, tmp_path: Path) -> None:
    storage = storage_at(any_url, tmp_path / "copies")
    assert steps(storage) == {}
    path = save(storage, 7, 2, epoch=3, known=(Lineage(2, 5),))
    assert path.name == "step-00000007"
    [(name, found)] = storage.each_checkpoint()
    assert isinstance(found, StoredCheckpoint)
    assert (name, found.step, found.generation, found.epoch, found.bytes) == (path, 7, 2, 3, 3007)
    assert found.lineage == (Lineage(2, 5),)
    assert storage.content_fault(found) is None
    directory, wrong = copied(storage, 7, STATE, "rank-00001.bin")
    assert wrong is None
    assert (directory / STATE).read_bytes() == state(7, 2)
    assert (directory / "rank-00001.bin").read_bytes() == b""
    assert not (directory / PRIVATE).exists()


def test_only_one_of_two_writers_of_a_step_publishes(any_url: str, tmp_path: Path) -> None:
    """Both have found the step free and uploaded their files. The second must not replace the first."""
    first, second = (storage_at(any_url, tmp_path / name) for name in ("first", "second"))
    arrived = threading.Barrier(2, timeout=60)
    real = object_storage.StagedObjects.publish

    def publish(staged: object_storage.StagedObjects) -> bool:
        arrived.wait()
        return real(staged)

    results: list[Path] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(object_storage.StagedObjects, "publish", publish)
        both = [threading.Thread(target=lambda s=s: results.append(save(s, 7))) for s in (first, second)]
        for each in both:
            each.start()
        for each in both:
            each.join()
    assert len(results) == 2, "the loser finds the winner's checkpoint, which is as good"
    found = first.load("step-00000007")
    assert first.content_fault(found) is None
    assert len(first._listing()["step-00000007"]) == 4, "the loser's files are gone"


def test_a_newer_generation_replaces_an_older_one_and_never_the_reverse(any_url: str, tmp_path: Path) -> None:
    storage = storage_at(any_url, tmp_path / "copies")
    save(storage, 7, 1)
    save(storage, 7, 3)
    assert steps(storage) == {7: 3}
    save(storage, 7, 2)
    assert steps(storage) == {7: 3}
    assert copied(storage, 7)[1] is None


def test_deleted_checkpoints_leave_only_empty_manifests(any_url: str, tmp_path: Path) -> None:
    storage = storage_at(any_url, tmp_path / "copies")
    newest = [save(storage, step) for step in (1, 2, 3)][-1]
    removed = retain(storage, Retention(1), frozenset({newest}))
    assert [path.name for path in removed] == ["step-00000002", "step-00000001"]
    assert (steps(storage), defects(storage)) == ({3: 1}, [])
    for path in removed:
        objects = storage._listing(path.name)[path.name]
        assert {key: each.bytes for key, each in objects.items()} == {MANIFEST: 0}
        with pytest.raises(InvalidCheckpoint, match="is empty: the checkpoint was removed"):
            storage.load(path.name)
    save(storage, 2, 2)
    assert steps(storage) == {3: 1, 2: 2}
    assert copied(storage, 2)[1] is None


def test_a_file_of_many_parts_is_read_back_unchanged(any_url: str, tmp_path: Path) -> None:
    storage = storage_at(any_url, tmp_path / "copies")
    source, size = tmp_path / "snapshot", 3 * CHUNK_BYTES + 17
    source.write_bytes(os.urandom(size))
    moves: list[int] = []
    written = writer.write(
        storage,
        generation=1,
        step=7,
        world_size=1,
        files={STATE: source},
        meta={},
        created_at=0.0,
        moved=lambda: moves.append(1),
    )
    assert len(moves) == 4
    directory, wrong = copied(storage, 7, STATE)
    assert wrong is None
    assert (directory / STATE).read_bytes() == source.read_bytes()
    assert retain(storage, Retention(1), frozenset({written})) == ()


# -- publishing


def refusing(
    code: str, status: int, method: str, ending: str, times: int = 10**9
) -> Callable[..., Fault | None]:
    left = [times]

    def interfere(request: Request) -> Fault | None:
        if request.method != method or not request.key.endswith(ending) or left[0] <= 0:
            return None
        left[0] -= 1
        return Refusal(status, code)

    return interfere


@pytest.mark.parametrize("ignored", ["If-Match", "If-None-Match"])
def test_a_storage_that_ignores_a_condition_is_refused_before_anything_is_written(
    server: ObjectServer, storage: ObjectStorage, ignored: str
) -> None:
    server.ignored_conditions = frozenset({ignored})
    with pytest.raises(OSError, match=f"ignores {ignored}, so checkpoints"):
        save(storage, 7)
    assert server.stored() == [f"{PREFIX}/conditional-put"]


@pytest.mark.parametrize("ending", [f"{STATE}/00000", MANIFEST])
def test_a_write_that_is_refused_leaves_no_checkpoint_and_no_objects(
    server: ObjectServer, storage: ObjectStorage, ending: str
) -> None:
    server.interfere = refusing("AccessDenied", 403, "PUT", ending)
    with pytest.raises(OSError, match=r"write: the credentials do not permit the request \(AccessDenied\)"):
        save(storage, 7)
    assert server.stored() == [f"{PREFIX}/conditional-put"]
    server.interfere = lambda _: None
    save(storage, 7)
    assert steps(storage) == {7: 1}


def test_an_upload_that_is_interrupted_is_not_a_checkpoint(
    server: ObjectServer, storage: ObjectStorage
) -> None:
    """A killed sidecar leaves such an upload, because nothing cleans up after it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ObjectStorage, "_discard", lambda *_: None)
        server.interfere = refusing("AccessDenied", 403, "PUT", MANIFEST)
        with pytest.raises(OSError, match="AccessDenied"):
            save(storage, 7)
    assert any(STATE in key for key in server.stored())
    assert list(storage.each_checkpoint()) == []
    with pytest.raises(InvalidCheckpoint, match=r"manifest\.json is missing"):
        storage.load("step-00000007")


@pytest.mark.parametrize("after", [False, True])
def test_a_manifest_whose_answer_is_lost_is_published_once(
    server: ObjectServer, storage: ObjectStorage, after: bool
) -> None:
    left = [2]

    def interfere(request: Request) -> Fault | None:
        if request.method == "PUT" and request.key.endswith(MANIFEST) and left[0]:
            left[0] -= 1
            return Cut(after)
        return None

    server.interfere = interfere
    save(storage, 7)
    assert left == [0] or after
    assert steps(storage) == {7: 1}
    assert copied(storage, 7)[1] is None


def test_a_manifest_that_may_have_been_published_keeps_its_files(
    server: ObjectServer, storage: ObjectStorage
) -> None:
    """The request was carried out, but its answer is lost, and so is the answer to every later request."""
    sent: list[Request] = []

    def interfere(request: Request) -> Fault | None:
        if request.method == "PUT" and request.key.endswith(MANIFEST):
            sent.append(request)
        return Cut(after=True) if sent else None

    server.interfere = interfere
    with pytest.raises(ObjectStoreError):
        save(storage, 7)
    server.interfere = lambda _: None
    assert steps(storage) == {7: 1}
    assert storage.content_fault(storage.load("step-00000007")) is None


def test_a_refusal_after_a_lost_answer_does_not_mean_that_nothing_was_published(
    server: ObjectServer, storage: ObjectStorage
) -> None:
    """The credentials expire just when the manifest is written."""
    sent: list[Request] = []

    def interfere(request: Request) -> Fault | None:
        if request.method == "PUT" and request.key.endswith(MANIFEST):
            sent.append(request)
            return Cut(after=True) if len(sent) == 1 else Refusal(400, "ExpiredToken")
        if sent and request.method == "GET" and request.key.endswith(MANIFEST):
            return Cut()
        return None

    server.interfere = interfere
    with pytest.raises(ObjectStoreError):
        save(storage, 7)
    server.interfere = lambda _: None
    assert len(sent) > 1
    assert steps(storage) == {7: 1}
    assert storage.content_fault(storage.load("step-00000007")) is None


def test_a_checkpoint_of_a_later_version_is_never_deleted(
    server: ObjectServer, storage: ObjectStorage
) -> None:
    save(storage, 7)
    server.put(f"{PREFIX}/step-00000007/{MANIFEST}", b"{}")
    [(path, damaged)] = storage.each_checkpoint()
    newer = b'{"format":2'
    server.put(f"{PREFIX}/step-00000007/{MANIFEST}", newer + b',"crc32":%d}' % zlib.crc32(newer))
    before = server.stored()
    storage.remove(path, damaged)
    for step in (8, 9):
        newest = save(storage, step)
    retain(storage, Retention(1), frozenset({newest}))
    assert set(before) <= set(server.stored())


def test_a_writer_never_replaces_a_checkpoint_that_it_has_not_seen(
    server: ObjectServer, storage: ObjectStorage, tmp_path: Path
) -> None:
    """Before it replaces an older checkpoint of its step, another member publishes a newer one."""
    save(storage, 7, 1)
    other = storage_at(server.url, tmp_path / "other")
    done: list[Path] = []

    def interfere(request: Request) -> Fault | None:
        if "If-Match" in request.conditions and not done:
            done.append(tmp_path)
            done.append(save(other, 7, 5))
        return None

    server.interfere = interfere
    save(storage, 7, 3)
    assert len(done) == 2
    assert steps(storage) == {7: 5}
    assert copied(storage, 7)[1] is None
    assert not any("-g3-" in key for key in server.stored())


def test_a_damaged_checkpoint_is_replaced_by_its_own_generation(
    server: ObjectServer, storage: ObjectStorage
) -> None:
    save(storage, 7)
    server.put(f"{folder(storage, 7)}/{STATE}/00000", bytes(3000))
    found = storage.load("step-00000007")
    assert storage.content_fault(found) == f"{STATE} is damaged: checksum differs in bytes 0 to 2999"
    save(storage, 7)
    assert storage.content_fault(storage.load("step-00000007")) is None


def test_a_member_of_an_older_epoch_publishes_nothing(server: ObjectServer, storage: ObjectStorage) -> None:
    save(storage, 7, epoch=4)
    before = server.stored()
    with pytest.raises(ValueError, match="a supervisor of epoch 4"):
        save(storage, 9, epoch=3)
    assert server.stored() == before


def test_a_member_that_was_cut_off_during_its_upload_publishes_nothing(
    server: ObjectServer, storage: ObjectStorage, tmp_path: Path
) -> None:
    other = storage_at(server.url, tmp_path / "other")
    done: list[Path] = []

    def interfere(request: Request) -> Fault | None:
        if request.method == "PUT" and PRIVATE in request.key and "e3-" in request.key and not done:
            done.append(tmp_path)
            done.append(save(other, 8, generation=2, epoch=4))
        return None

    server.interfere = interfere
    with pytest.raises(ValueError, match="a supervisor of epoch 4"):
        save(storage, 9, epoch=3)
    assert steps(storage) == {8: 2}
    assert not any("e3-" in key for key in server.stored())


def test_a_writer_whose_parts_were_deleted_meanwhile_publishes_nothing(
    server: ObjectServer, storage: ObjectStorage
) -> None:
    def interfere(request: Request) -> Fault | None:
        if request.method == "GET" and request.query.get("prefix", "").count("/e0-"):
            for key in server.stored():
                if STATE in key:
                    server.drop(key)
        return None

    server.interfere = interfere
    with pytest.raises(OSError, match="another member has removed or replaced the object"):
        save(storage, 7)
    assert steps(storage) == {}


# -- deleting


def test_a_member_of_an_older_epoch_deletes_nothing(server: ObjectServer, storage: ObjectStorage) -> None:
    for step in (1, 2, 3):
        save(storage, step, epoch=4)
    before = server.stored()
    assert retain(storage, Retention(1, epoch=3)) == ()
    assert server.stored() == before


def test_a_checkpoint_that_was_replaced_after_it_was_listed_is_not_deleted(
    server: ObjectServer, storage: ObjectStorage, tmp_path: Path
) -> None:
    save(storage, 7, 1)
    [(path, old)] = storage.each_checkpoint()
    save(storage_at(server.url, tmp_path / "other"), 7, 2)
    storage.remove(path, old)
    assert steps(storage) == {7: 2}
    assert copied(storage, 7)[1] is None


def test_a_deletion_that_is_interrupted_leaves_no_damaged_checkpoint(
    server: ObjectServer, storage: ObjectStorage
) -> None:
    for step in (1, 2):
        save(storage, step)

    server.interfere = lambda each: Refusal(403, "AccessDenied") if "delete" in each.query else None
    with pytest.raises(OSError, match="delete"):
        retain(storage, Retention(1))
    assert (steps(storage), defects(storage)) == ({2: 1}, [])
    assert any("step-00000001" in key for key in server.filled())
    server.interfere = lambda _: None
    newest = save(storage, 3, 2, epoch=1)
    retain(storage, Retention(1, epoch=1), frozenset({newest}))
    assert all("step-00000003" in key for key in server.filled())


def at_each_request(
    server: ObjectServer,
    act: Callable[[], object],
    meanwhile: Callable[[], object],
    before: Callable[[], object],
    check: Callable[[], object],
) -> int:
    """Run `act`, and `meanwhile` before one of its requests is carried out: each in turn, on an empty bucket.

    Return the number of requests.
    """
    for number in itertools.count(1):
        server.buckets["checkpoints"].clear()
        before()
        requests = itertools.count(1)

        def interfere(_: Request, requests: Iterator[int] = requests, number: int = number) -> None:
            if next(requests) == number:
                server.interfere = lambda _: None
                meanwhile()

        server.interfere = interfere
        act()
        if server.interfere is interfere:
            server.interfere = lambda _: None
            return number - 1
        check()
    raise AssertionError("unreachable")


KNOWN = (Lineage(2, 5),)  # generation 2 has resumed from step 5, so step 7 of generation 1 is void


@pytest.mark.parametrize(("epoch", "lineage"), [(9, ()), (0, KNOWN)])
def test_a_checkpoint_published_at_any_request_of_a_retention_stays_whole(
    server: ObjectServer, storage: ObjectStorage, tmp_path: Path, lineage: tuple[Lineage, ...], epoch: int
) -> None:
    other = storage_at(server.url, tmp_path / "other")

    def before() -> None:
        for step in (5, 7) if lineage else (5, 7, 9):
            save(storage, step)

    def check() -> None:
        assert steps(other)[7] == 2
        assert defects(other) == []
        assert other.content_fault(other.load("step-00000007")) is None
        newest = save(other, 8, 3, epoch=10, known=(*KNOWN, Lineage(3, 7)))
        retain(other, Retention(1, epoch=10), frozenset({newest}))
        assert {key.split("/")[2] for key in server.filled()} == {newest.name}

    count = at_each_request(
        server,
        lambda: retain(storage, Retention(1, lineage)),
        lambda: save(other, 7, 2, epoch=epoch, known=KNOWN),
        before,
        check,
    )
    assert count >= 8


def test_a_deletion_at_any_request_of_a_replacement_leaves_the_new_checkpoint_whole(
    server: ObjectServer, storage: ObjectStorage, tmp_path: Path
) -> None:
    other = storage_at(server.url, tmp_path / "other")
    listed: list[tuple[Path, StoredCheckpoint | InvalidCheckpoint]] = []

    def before() -> None:
        save(other, 7)
        listed[:] = other.each_checkpoint()

    def check() -> None:
        assert (steps(storage), defects(storage)) == ({7: 2}, [])
        assert storage.content_fault(storage.load("step-00000007")) is None

    count = at_each_request(
        server,
        lambda: save(storage, 7, 2, epoch=9, known=KNOWN),
        lambda: [other.remove(*each) for each in listed],
        before,
        check,
    )
    assert count >= 10


@pytest.mark.parametrize(
    ("step", "age_s", "epoch", "stays"),
    [
        (5, DEBRIS_AGE_S + 60.0, 2, False),
        (5, DEBRIS_AGE_S - 60.0, 2, True),  # a writer of this step may still be at work
        (5, DEBRIS_AGE_S + 60.0, 1, True),  # this member may be cut off
        (8, DEBRIS_AGE_S + 60.0, 2, True),  # a group that resumes from step 7 will save this step
    ],
)
def test_an_empty_manifest_is_deleted_once_no_writer_can_replace_it(
    server: ObjectServer, storage: ObjectStorage, step: int, age_s: float, epoch: int, stays: bool
) -> None:
    key = f"{PREFIX}/step-{step:08d}/{MANIFEST}"
    server.ages_s = age_s
    server.put(key, b"")
    server.ages_s = 0.0
    newest = [save(storage, each, epoch=2) for each in (7, 9)][-1]
    retain(storage, Retention(2, epoch=epoch), frozenset({newest}))
    assert (key in server.stored()) == stays
    assert steps(storage) == {9: 1, 7: 1}


def test_a_writer_whose_parts_were_deleted_before_it_published_reports_an_error(
    server: ObjectServer, storage: ObjectStorage
) -> None:
    """It was stopped for so long that it counted as dead."""

    def interfere(request: Request) -> Fault | None:
        if request.method == "PUT" and request.key.endswith(MANIFEST):
            server.interfere = lambda _: None
            for key in server.stored():
                if STATE in key:
                    server.drop(key)
        return None

    server.interfere = interfere
    with pytest.raises(OSError, match="another member has removed or replaced the object"):
        save(storage, 7)
    save(storage, 7)
    assert copied(storage, 7)[1] is None


@pytest.mark.parametrize(
    ("epoch", "age_s", "stays"),
    [
        (1, 60.0, False),  # fenced off by the epoch of the newest checkpoint
        (2, 60.0, True),  # its writer may still be at work
        (2, DEBRIS_AGE_S + 60.0, False),
        (3, DEBRIS_AGE_S + 60.0, True),  # from a later supervisor
        (1, -60.0, True),  # newer than all checkpoints
    ],
)
def test_leftovers_are_deleted_only_if_their_writer_is_dead_or_of_an_older_epoch(
    server: ObjectServer, storage: ObjectStorage, epoch: int, age_s: float, stays: bool
) -> None:
    key = f"{PREFIX}/step-00000005/e{epoch}-g1-0123456789abcdef/{STATE}/00000"
    server.ages_s = age_s
    server.put(key, b"left")
    server.ages_s = 0.0
    newest = save(storage, 7, epoch=2)
    retain(storage, Retention(1, epoch=2), frozenset({newest}))
    assert (key in server.stored()) == stays
    assert steps(storage) == {7: 1}


def test_objects_that_holdfast_did_not_write_are_never_deleted(
    server: ObjectServer, storage: ObjectStorage
) -> None:
    foreign = [
        f"{PREFIX}/notes.txt",
        f"{PREFIX}/step-00000005/mine/x",
        f"{PREFIX}-2/step-00000001/x",
        "other",
    ]
    server.ages_s = 10 * DEBRIS_AGE_S
    for key in foreign:
        server.put(key, b"x")
    server.ages_s = 0.0
    for step in (6, 7):
        newest = save(storage, step, epoch=2)
    retain(storage, Retention(1, epoch=2), frozenset({newest}))
    assert set(foreign) <= set(server.stored())


# -- listing


def test_a_manifest_is_read_once_however_often_it_is_listed(
    server: ObjectServer, storage: ObjectStorage
) -> None:
    save(storage, 7)
    for _ in range(3):
        assert steps(storage) == {7: 1}
    assert server.count("GET", MANIFEST) == 1
    save(storage, 7, 2)
    assert steps(storage) == {7: 2}


def test_a_checkpoint_without_one_of_its_objects_is_refused(
    server: ObjectServer, storage: ObjectStorage
) -> None:
    save(storage, 7)
    key = f"{folder(storage, 7)}/{PRIVATE}/00000"
    server.put(key, b"longer than it was")
    assert defects(storage) == [f"{PRIVATE} has 18 bytes from byte 0, but 7 were written"]
    server.drop(key)
    assert defects(storage) == [f"{PRIVATE} is missing"]
    server.put(f"{PREFIX}/step-00000007/{MANIFEST}", b"{}")
    assert defects(storage) == [f"{MANIFEST} is truncated or damaged: it does not end with its checksum"]


@pytest.mark.parametrize("removed", [False, True])
def test_a_checkpoint_that_is_replaced_or_removed_during_a_listing_does_not_look_damaged(
    server: ObjectServer, storage: ObjectStorage, tmp_path: Path, removed: bool
) -> None:
    save(storage, 7)
    other = storage_at(server.url, tmp_path / "other")
    [(path, what)] = other.each_checkpoint()

    def interfere(request: Request) -> None:
        if request.method == "GET" and request.key.endswith(MANIFEST):
            server.interfere = lambda _: None
            if removed:
                other.remove(path, what)
            else:
                save(other, 7, 2)

    server.interfere = interfere
    found = [what for _, what in storage.each_checkpoint()]
    assert [what.generation for what in found if isinstance(what, StoredCheckpoint)] == [2][removed:]
    assert len(found) == 1 - removed


def test_more_objects_than_one_answer_holds_are_all_listed(
    server: ObjectServer, storage: ObjectStorage
) -> None:
    save(storage, 7)
    for number in range(1500):
        server.put(f"{PREFIX}/a/{number:05d}", b"")
    assert steps(storage) == {7: 1}
    assert len(storage._listing()["a"]) == 1500


def test_a_directory_copied_into_the_bucket_is_a_checkpoint(
    server: ObjectServer, storage: ObjectStorage, tmp_path: Path
) -> None:
    path = writer.write(
        tmp_path / "files",
        generation=1,
        step=7,
        world_size=1,
        files={STATE: os.urandom(2 * CHUNK_BYTES + 1)},
        meta={},
        created_at=0.0,
    )
    for file in path.iterdir():
        server.put(f"{PREFIX}/{path.name}/{file.name}", file.read_bytes())
    directory, wrong = copied(storage, 7, STATE)
    assert wrong is None
    assert (directory / STATE).read_bytes() == (path / STATE).read_bytes()
    assert storage.content_fault(storage.load(path.name)) is None
    assert server.count("GET", f"{path.name}/{STATE}") == 6, (
        "the file must be read in pieces, because it may not fit in memory"
    )
    save(storage, 9)
    retain(storage, Retention(1))
    assert steps(storage) == {9: 1}
    assert not any("step-00000007" in key for key in server.filled())


# -- copies


def test_a_copy_that_was_interrupted_reads_only_what_is_missing(
    server: ObjectServer, storage: ObjectStorage, tmp_path: Path
) -> None:
    save(storage, 7, size=6 * CHUNK_BYTES)
    asked: list[str] = []

    def interfere(request: Request) -> Fault | None:
        if request.method != "GET" or STATE not in request.key:
            return None
        asked.append(request.key)
        return Refusal(403, "AccessDenied") if len(asked) > 3 else None

    server.interfere = interfere
    with pytest.raises(OSError, match="AccessDenied"):
        copied(storage, 7)
    assert not (tmp_path / "copies" / "step-00000007" / STATE).exists()
    good = asked[:3]
    asked.clear()
    server.interfere = lambda request: asked.append(request.key) if request.method == "GET" else None
    directory, wrong = copied(
        storage_at(server.url, tmp_path / "copies"), 7
    )  # the client of a restarted sidecar
    assert wrong is None
    assert (directory / STATE).read_bytes() == state(7, 1, 6 * CHUNK_BYTES)
    read = [key for key in asked if STATE in key]
    assert len(read) == 3
    assert not set(read) & set(good)
    asked.clear()
    assert copied(storage, 7) == (directory, None)
    assert not [key for key in asked if STATE in key]


def test_a_damaged_object_is_named_and_not_copied(server: ObjectServer, storage: ObjectStorage) -> None:
    save(storage, 7, size=2 * CHUNK_BYTES)
    key = f"{folder(storage, 7)}/{STATE}/00001"
    server.put(key, bytes(CHUNK_BYTES))
    directory, wrong = copied(storage, 7)
    begin, end = CHUNK_BYTES, 2 * CHUNK_BYTES - 1
    assert wrong == f"{STATE} is damaged: checksum differs in bytes {begin} to {end}"
    assert not (directory / STATE).exists()


def test_a_damaged_copy_is_read_again(storage: ObjectStorage) -> None:
    save(storage, 7)
    directory, _ = copied(storage, 7)
    (directory / STATE).write_bytes(bytes(3000))
    assert copied(storage, 7)[1] is None
    assert (directory / STATE).read_bytes() == state(7)


def test_a_copy_replaces_the_copy_of_another_checkpoint_and_can_be_removed(
    storage: ObjectStorage, tmp_path: Path
) -> None:
    for step in (7, 8):
        save(storage, step)
        copied(storage, step)
    (tmp_path / "copies" / "mine").write_bytes(b"x")
    assert {path.name for path in (tmp_path / "copies").iterdir()} == {"step-00000008", "mine"}
    storage.forget_copies("step-00000008")
    storage.forget_copies()
    assert [path.name for path in (tmp_path / "copies").iterdir()] == ["mine"]
    shutil.rmtree(tmp_path / "copies")
    storage.forget_copies()


def test_a_copy_that_does_not_fit_reports_the_missing_space(
    server: ObjectServer, storage: ObjectStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(storage, 7)
    real = os.statvfs

    def full(path: str) -> os.statvfs_result:
        values = list(real(path))
        values[4] = 0  # f_bavail
        return os.statvfs_result(values)

    monkeypatch.setattr(os, "statvfs", full)
    with pytest.raises(OSError, match="3,007 bytes are needed to copy the checkpoint here") as caught:
        copied(storage, 7)
    assert caught.value.errno == errno.ENOSPC
    assert server.count("GET", "/00000") == 0


def test_parts_grow_with_the_file_up_to_a_limit() -> None:
    assert transfers.part_bytes(0) == transfers.part_bytes(1000 * CHUNK_BYTES) == CHUNK_BYTES
    assert transfers.part_bytes(1000 * CHUNK_BYTES + 1) == 2 * CHUNK_BYTES
    assert transfers.part_bytes(1 << 50) == transfers.LARGEST

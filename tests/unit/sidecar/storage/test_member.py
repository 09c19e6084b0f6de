"""A member saves to object storage, lists it, restores from it, and reports its errors."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.checkpoint.retention import Retention
from holdfast.protocol.launcher_messages import Restore
from holdfast.protocol.member_messages import StorageListing
from holdfast.snapshot.commit_records import CommitRecord
from sidecar.state import restore, storage_listing
from sidecar.state.checkpointing import CheckpointSaver
from sidecar.state.restore import Restorer, StateUnavailable, StorageFailed
from sidecar.state.storage_listing import StorageLister
from sidecar.storage.object_client import ObjectClient
from sidecar.storage.object_storage import ObjectStorage
from tests.s3server.server import (
    ACCESS_KEY,
    SECRET_KEY,
    Fault,
    Hang,
    ObjectServer,
    Refusal,
    Request,
)
from tests.unit.sidecar.fake_peer import fetching
from tests.unit.sidecar.memory import holdings, member, private, snapshot
from tests.unit.sidecar.state.test_restore import LAUNCH, order
from tests.unit.sidecar.storage.checkpoints import steps
from tests.unit.sidecar.storage.conftest import LOCATION, QUICK, storage_at, variables
from tests.unit.sidecar.test_reconciler import at_work, run
from tests.unit.supervisor.job_views import launcher, rank

URL = str(LOCATION)


@pytest.fixture
def here() -> Iterator[Path]:
    with member() as path:
        yield path


def ready(path: Path, step: int = 7) -> CommitRecord:
    record = snapshot(path, 2, step, fill=step)
    private(path, 0, 2, step, b"zero")
    private(path, 1, 2, step, b"one", kept=True)
    return record


async def saved(here: Path, storage: ObjectStorage, record: CommitRecord) -> CheckpointSaver:
    async with fetching(here) as fetcher:
        saver = CheckpointSaver(holdings(here), fetcher, storage)
        saver.retention = Retention(epoch=3)
        await saver.save(record, (), {}, asked=1)
        return saver


async def restored(
    here: Path, storage: ObjectStorage, step: int = 7, generation: int = 2
) -> tuple[Path, list[Path]]:
    wanted = Restore(step, generation, "checkpoint", f"{URL}/step-{step:08d}")
    async with fetching(here) as fetcher:
        preparer = Restorer(holdings(here), fetcher, storage)
        launch, ranks = await preparer.prepare(
            order(launch=replace(LAUNCH, restore=wanted), ranks=(1,)), lambda: None
        )
        assert preparer.unread_s == -1.0
    assert launch.restore is not None
    return Path(launch.restore.path), [Path(rank.private) for rank in ranks]


async def test_a_member_saves_and_another_one_restores_its_part(
    here: Path, storage: ObjectStorage, server: ObjectServer, tmp_path: Path
) -> None:
    record = ready(here)
    saver = await saved(here, storage, record)
    assert (saver.durable.error, saver.durable.path) == ("", f"{URL}/step-00000007")
    other = storage_at(server.url, tmp_path / "elsewhere")
    path, privates = await restored(here, other)
    assert path == tmp_path / "elsewhere" / "step-00000007"
    assert (path / "replicated.safetensors").read_bytes() == record.path.read_bytes()
    assert [each.read_bytes() for each in privates] == [b"one"]
    assert not (path / "rank-00000.bin").exists(), "this is another member's part"


async def test_a_storage_error_is_reported_and_the_next_save_succeeds(
    here: Path, storage: ObjectStorage, server: ObjectServer
) -> None:
    record = ready(here)
    server.interfere = lambda _: Refusal(400, "ExpiredToken", f"<Token>{SECRET_KEY}</Token>")
    saver = await saved(here, storage, record)
    assert saver.durable.error == f"{URL}: list: the credentials have expired (ExpiredToken)"
    assert saver.durable.step == -1
    server.interfere = lambda _: None
    assert (await saved(here, storage, record)).durable.error == ""


async def test_wrong_credentials_do_not_end_the_process_and_no_report_has_them(
    here: Path, tmp_path: Path
) -> None:
    given = {"AWS_ACCESS_KEY_ID": ACCESS_KEY}

    def connect() -> ObjectClient:
        with variables(given):
            return ObjectClient(LOCATION, given, QUICK)

    storage = ObjectStorage(LOCATION, connect, tmp_path)
    saver = await saved(here, storage, ready(here))
    assert saver.durable.error.endswith("AWS_ACCESS_KEY_ID is set, but AWS_SECRET_ACCESS_KEY is not")
    assert ACCESS_KEY not in saver.durable.error


async def listed(lister: StorageLister, changed: asyncio.Event, number: int) -> StorageListing:
    async def wait() -> None:
        while lister.listing.number < number:
            changed.clear()
            await changed.wait()

    running = asyncio.create_task(lister.run())
    try:
        await asyncio.wait_for(wait(), 20)
    finally:
        running.cancel()
    return lister.listing


async def test_a_storage_that_never_answers_is_reported_as_an_error(
    storage: ObjectStorage, server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_listing, "ANSWER_S", 0.05)
    hang, changed = Hang(), asyncio.Event()
    server.interfere = lambda _: hang
    try:
        found = await listed(StorageLister(storage, changed.set, lambda: 0), changed, 1)
        assert found.error
        assert found.checkpoints == ()
    finally:
        hang.end.set()


async def test_checkpoints_are_listed_with_their_epoch(here: Path, storage: ObjectStorage) -> None:
    await saved(here, storage, ready(here))
    changed = asyncio.Event()
    found = await listed(StorageLister(storage, changed.set, lambda: 0), changed, 1)
    assert [(each.name, each.step) for each in found.checkpoints] == [("step-00000007", 7)]
    assert (found.epoch, found.error) == (3, "")


async def test_a_restore_waits_for_storage_that_fails_for_a_while(
    here: Path, storage: ObjectStorage, server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restore, "STORAGE_POLL_S", 0.001)
    await saved(here, storage, ready(here))
    left = [2]

    def interfere(request: Request) -> Fault | None:
        if request.method != "GET" or "replicated" not in request.key or not left[0]:
            return None
        left[0] -= 1
        return Refusal(403, "AccessDenied")

    server.interfere = interfere
    path, _ = await restored(here, storage)
    assert left == [0]
    assert (path / "replicated.safetensors").exists()


async def test_storage_that_keeps_failing_casts_no_doubt_on_the_checkpoint(
    here: Path, storage: ObjectStorage, server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restore, "STORAGE_S", 0.0)
    await saved(here, storage, ready(here))
    server.interfere = lambda _: Refusal(403, "AccessDenied")
    with pytest.raises(StorageFailed, match=r"checkpoint step-00000007: .*AccessDenied"):
        await restored(here, storage)


async def test_a_checkpoint_of_another_generation_or_without_a_file_is_not_used(
    here: Path, storage: ObjectStorage, server: ObjectServer
) -> None:
    await saved(here, storage, ready(here))
    with pytest.raises(StateUnavailable, match="its generation is 2, expected 1"):
        await restored(here, storage, generation=1)
    for key in server.stored():
        if "rank-00001.bin" in key:
            server.drop(key)
    with pytest.raises(StateUnavailable, match=r"rank-00001\.bin is missing") as caught:
        await restored(here, storage)
    assert not isinstance(caught.value, StorageFailed)
    assert steps(storage) == {}


async def test_a_start_from_a_checkpoint_has_a_copy_of_it_until_all_ranks_have_restored(
    here: Path, server: ObjectServer, storage: ObjectStorage
) -> None:
    assert server.url
    await saved(here, storage, ready(here))
    wanted = Restore(7, 2, "checkpoint", f"{URL}/step-00000007")
    async with at_work(here, LOCATION) as place:
        await place.sidecar.obey(run(3, wanted))
        heard = await place.heard()
        assert heard.launch is not None
        assert heard.launch.restore is not None
        copy = Path(heard.launch.restore.path)
        assert copy == here / "checkpoints" / "step-00000007"
        assert Path(heard.ranks[0].private).read_bytes() == b"zero"
        await place.tells(launcher(rank(0, generation=3), generation=3))
        assert copy.exists()
        await place.sidecar.obey(replace(run(3, wanted), settled=True))
        report = await place.until(lambda _: not copy.exists())
        assert report.reading_s == -1.0


async def test_a_member_reports_how_long_storage_has_sent_nothing(
    here: Path, server: ObjectServer, storage: ObjectStorage
) -> None:
    """The supervisor sets no limit to a start that keeps receiving data."""
    await saved(here, storage, ready(here))
    hang, asked = Hang(), threading.Event()

    def interfere(request: Request) -> Fault | None:
        if "replicated" not in request.key:
            return None
        asked.set()
        return hang

    server.interfere = interfere
    async with at_work(here, LOCATION) as place:
        await place.sidecar.obey(run(3, Restore(7, 2, "checkpoint", f"{URL}/step-00000007")))
        preparing = asyncio.create_task(place.heard())
        assert await asyncio.to_thread(asked.wait, 20)
        assert place.sidecar.next_report().reading_s >= 0.0
        server.interfere = lambda _: None
        hang.end.set()
        assert (await preparing).do == "run"
        assert place.sidecar.next_report().reading_s == -1.0

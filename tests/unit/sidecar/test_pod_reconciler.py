"""A sidecar in a pod: the secret that it sends its peers, and the storage listing in its reports."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from aiohttp import ClientSession
from aiohttp.test_utils import TestServer

from holdfast.checkpoint.sharing import ShareRefused
from holdfast.inspection import liveness
from holdfast.process import event_loop
from holdfast.process.network import Door
from holdfast.protocol import codec
from holdfast.protocol.launcher_messages import Ending, Launch, LauncherOrder, RankStart
from holdfast.protocol.member_messages import MemberAction, MemberOrder, MemberReport, StateSource
from holdfast.snapshot.arena import Arena
from sidecar.config import Config
from sidecar.reconciler import Sidecar
from sidecar.state import peers, piece_writer
from sidecar.state.piece_writer import PieceRequest, WrittenPiece
from sidecar.watch.unsupervised import LIMIT_S
from tests.samples.checkpoints import save
from tests.unit.sidecar.memory import member, private
from tests.unit.sidecar.sharing.group import (
    GENERATION,
    NEWEST,
    STEP,
    Staged,
    hold,
    post,
    small_states_pay,
    unhurried,
)
from tests.unit.supervisor.job_views import launcher, rank
from tests.unit.users import Identity, kubelet_volume, needs_root

ANSWER_S = 20.0
IDLE = MemberOrder("idle", 1, epoch=2, secret="of the job")


@pytest.fixture
def here() -> Iterator[Path]:
    with member() as path:
        yield path


@asynccontextmanager
async def sidecar(
    here: Path,
    address: str = "127.0.0.1",
    *,
    reports: bool = False,
    node: str = "n0",
    checkpoints: Path | None = None,
) -> AsyncIterator[Sidecar]:
    token = here / "token"
    token.write_text("of the pod\n")
    storage = checkpoints or here / "checkpoints"
    config = Config("m0", node, 1, here, storage, "", token, address=address, reports_storage=reports)
    made = Sidecar(config)
    try:
        yield made
    finally:
        await made.peers.close()


async def test_peers_receive_the_secret_of_the_job_and_never_the_pods_token(here: Path) -> None:
    """With this token, a peer could send reports to the supervisor in the name of this pod."""
    async with sidecar(here) as made:
        assert made.peer_token() == ""
        await made.obey(IDLE)
        assert made.peer_token() == "of the job"
        await made.obey(replace(IDLE, epoch=1, secret="of a supervisor that was replaced"))
        assert made.peer_token() == "of the job"
        await made.obey(replace(IDLE, epoch=3, secret="the next one"))
        assert made.peer_token() == "the next one"


async def test_members_of_one_machine_share_the_runs_token(here: Path) -> None:
    async with sidecar(here, address="") as made:
        await made.obey(IDLE)
        assert made.peer_token() == "of the pod"


async def test_no_state_is_sent_before_the_secret_is_known(here: Path) -> None:
    private(here, 1, 2, 7)
    async with sidecar(here) as made:
        app = peers.application(made.holdings, made.peer_token, Door())
        async with TestServer(app) as server, ClientSession() as session:
            url = server.make_url("/v1/private/1/2/7")

            async def ask(header: str | None) -> int:
                headers = {} if header is None else {"Authorization": header}
                async with session.get(url, headers=headers) as answer:
                    return answer.status

            for header in (None, "", "Bearer", "Bearer ", "Bearer of the pod", "Bearer of the job"):
                assert await ask(header) == 401
            await made.obey(IDLE)
            assert await ask("Bearer of the job") == 200
            assert await ask("Bearer of the pod") == 401
            assert await ask("Bearer ") == 401


def test_the_secret_is_in_no_log_line() -> None:
    assert "of the job" not in repr(IDLE)
    assert "of the job" not in logging.LogRecord("n", 1, "", 1, "%s", (IDLE,), None).getMessage()
    assert codec.decode(MemberOrder, codec.encode(IDLE)).secret == "of the job"


async def test_a_pod_lists_the_storage_in_its_reports(here: Path) -> None:
    save(here / "checkpoints", 5)
    async with sidecar(here, reports=True) as made:
        before = made.next_report().storage
        assert before is not None
        assert (before.number, before.error) == (0, "it has not been read yet")
        running = asyncio.create_task(made.list_storage())
        await asyncio.wait_for(made.supervisor.dirty.wait(), ANSWER_S)
        report = codec.decode(MemberReport, codec.encode(made.next_report()))
        assert report.storage is not None
        assert [each.step for each in report.storage.checkpoints] == [5]
        await event_loop.end([running])


async def test_a_supervisor_that_reads_the_storage_itself_gets_no_listing(here: Path) -> None:
    async with sidecar(here) as made:
        assert made.next_report().storage is None
        running = asyncio.create_task(made.list_storage())
        await asyncio.sleep(0)
        assert not running.done(), "the end of the service would end the sidecar"
        await event_loop.end([running])


@pytest.mark.parametrize("address", ["127.0.0.1", ""], ids=["pods", "one machine"])
async def test_pods_write_a_checkpoint_together_and_members_of_one_machine_do_not(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    small_states_pay(monkeypatch)
    hold(here)
    with member() as there:
        hold(there)
        async with (
            sidecar(here, address, checkpoints=tmp_path) as writer,
            sidecar(there, address, node="n1", checkpoints=tmp_path) as peer,
        ):
            app = peers.application(peer.holdings, peer.peer_token, Door(), pieces=peer.pieces)
            async with TestServer(app) as server:
                source = StateSource(str(server.make_url("")).rstrip("/"), 1)
                order = replace(
                    IDLE,
                    do="secure",
                    generation=GENERATION,
                    sources=(source,),
                    save=1,
                    save_step=STEP,
                    save_generation=GENERATION,
                )
                asked: list[PieceRequest] = []
                if peer.pieces is not None:
                    write = peer.pieces.write

                    async def noted(
                        generation: int, step: int, piece: PieceRequest, *rest: Any
                    ) -> WrittenPiece:
                        asked.append(piece)
                        return await write(generation, step, piece, *rest)

                    monkeypatch.setattr(peer.pieces, "write", noted)
                monkeypatch.setattr(writer.checkpoint_saver, "_storage", unhurried(tmp_path))
                await peer.obey(replace(order, save=0))
                await writer.obey(order)
                await writer.checkpoint_schedule.save_on_request(order)
                assert (writer.checkpoint_saver.durable.error, writer.checkpoint_saver.durable.step) == (
                    "",
                    STEP,
                )
    assert bool(asked) == bool(address)
    assert {(each.epoch, each.generation, each.node) for each in asked} <= {(2, GENERATION, "n0")}


@pytest.mark.parametrize(
    "change",
    [*({"do": do} for do in get_args(MemberAction) if do != "run"), {"generation": GENERATION + 1}],
    ids=str,
)
async def test_an_order_releases_the_snapshot_unless_the_group_trains_on(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    """It is pinned while the member writes pieces of another member's checkpoint, and a little longer."""
    monkeypatch.setattr(piece_writer, "HOLD_S", 3600.0)
    hold(here)
    staged = Staged(tmp_path, here)
    slot = Arena(here / "arena")._slots[staged.record.slot]
    run = replace(IDLE, do="run", generation=GENERATION, epoch=NEWEST.epoch)
    async with sidecar(here, node="n1", checkpoints=tmp_path) as made:
        app = peers.application(made.holdings, made.peer_token, Door(), pieces=made.pieces)
        async with TestServer(app) as server:
            url = str(server.make_url("")).rstrip("/")
            await made.obey(run)
            assert (await post(url, staged.right, token="of the job"))[0] == 200
            outdated = replace(run, do="secure", generation=GENERATION - 1)
            for again in (run, replace(run, look=1), outdated):
                await made.obey(again)
                assert not slot.acquire()
            await made.obey(replace(run, **change))
            assert slot.acquire()
            slot.release()
            assert (await post(url, staged.right, token="of the job"))[0] == 409


async def test_a_sidecar_that_has_restarted_helps_nobody_before_its_first_order(
    here: Path, tmp_path: Path
) -> None:
    """It does not know yet whether the group trains."""
    hold(here)
    request = Staged(tmp_path, here).right
    async with sidecar(here, node="n1", checkpoints=tmp_path) as made:
        assert made.pieces is not None
        with pytest.raises(ShareRefused, match="order is 'idle'"):
            await made.pieces.write(GENERATION, STEP, request, lambda: False)
        await made.obey(replace(IDLE, do="run", generation=GENERATION, epoch=NEWEST.epoch))
        assert (await made.pieces.write(GENERATION, STEP, request, lambda: False)).crc32 == request.crc32
        await made.pieces.close()


# -- without a supervisor


class Member:
    """A sidecar in a pod whose launcher is a list of the orders that it receives."""

    def __init__(self, made: Sidecar, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sidecar, self.orders = made, list[LauncherOrder]()
        monkeypatch.setattr(made.launcher, "send", self.orders.append)

    def poll(self, now_s: float, lateness_s: float = 0.0) -> list[str]:
        """Poll at a time, and return the actions of the orders that this sent."""
        self.orders.clear()
        self.sidecar._poll(now_s, lateness_s)
        return [each.do for each in self.orders]


CRASHED = launcher(rank(0, Ending(5, signal=9)))


async def test_a_pod_whose_rank_failed_without_a_supervisor_ends_with_its_code_at_the_limit(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Holdfast may have been uninstalled, and then the owner's own restart policy must act."""
    async with sidecar(here) as made:
        there = Member(made, monkeypatch)
        made.launcher.state = launcher(rank(0))
        begun_s = time.monotonic()
        assert there.poll(begun_s + 10 * LIMIT_S) == [], "ranks that train are left alone"
        made.launcher.state = CRASHED
        assert there.poll(begun_s) == []
        assert "wait for orders" in capsys.readouterr().err
        assert there.poll(begun_s + LIMIT_S - 0.01) == []
        assert there.poll(begun_s + LIMIT_S) == ["stop"]
        (order,) = there.orders
        assert (order.exit_code, order.ending_only) == (137, True)
        assert there.poll(begun_s + LIMIT_S + 1) == ["stop"], "until the launcher reports that it ends"
        made.launcher.state = replace(CRASHED, stopped=True)
        assert there.poll(begun_s + LIMIT_S + 2) == []
        assert capsys.readouterr().err.count("the training container ends") == 1


async def test_a_supervisor_that_comes_back_just_before_the_limit_is_obeyed(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async with sidecar(here) as made:
        there = Member(made, monkeypatch)
        made.launcher.state = CRASHED
        begun_s = time.monotonic()
        there.poll(begun_s)
        await made.obey(MemberOrder("secure", 1, epoch=2))
        assert there.poll(begun_s + LIMIT_S) == []
        assert "wait for a supervisor is over" in capsys.readouterr().err


async def test_an_order_of_a_supervisor_that_was_replaced_is_no_sign_of_a_supervisor(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with sidecar(here) as made:
        there = Member(made, monkeypatch)
        await made.obey(MemberOrder("idle", 1, epoch=5))
        made.supervisor.alone_since_s = 1.0
        made.launcher.state = CRASHED
        begun_s = time.monotonic()
        there.poll(begun_s)
        await made.obey(MemberOrder("idle", 1, epoch=4))
        assert there.poll(begun_s + LIMIT_S) == ["stop"]
        assert there.orders[0].epoch == 5, "the launcher refuses a lower one"


async def test_a_supervisor_that_comes_too_late_starts_no_ranks_in_a_launcher_that_ends(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with sidecar(here) as made:
        there = Member(made, monkeypatch)
        made.launcher.state = replace(CRASHED, stopped=True)
        launch = Launch(2, 1, 1, "", 0, 0, 0.0)
        await made.obey(MemberOrder("run", 2, launch, (RankStart(0, 0),), epoch=2))
        made._pursue()
        assert (made._busy, there.orders) == ({}, [])


async def test_a_member_whose_ranks_cannot_start_without_a_supervisor_waits_and_says_so_once(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async with sidecar(here) as made:
        there = Member(made, monkeypatch)
        made.launcher.state = launcher()
        alone_s = made.supervisor.alone_since_s
        assert alone_s is not None
        assert there.poll(alone_s + LIMIT_S - 1) == []
        assert "no rank can start" not in capsys.readouterr().err
        for more_s in (0.0, 1.0, 1000.0):
            assert there.poll(alone_s + LIMIT_S + more_s) == []
        assert capsys.readouterr().err.count("no rank can start") == 1


async def test_a_member_on_a_single_machine_leaves_the_supervisor_to_the_keeper(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with sidecar(here, address="") as made:
        there = Member(made, monkeypatch)
        made.launcher.state = CRASHED
        begun_s = time.monotonic()
        there.poll(begun_s)
        assert there.poll(begun_s + LIMIT_S) == []


@needs_root
async def test_a_sidecar_that_may_not_connect_to_its_launcher_reports_both_users() -> None:
    with kubelet_volume() as volume, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(volume / "launcher.sock"))
        listener.listen()
        (volume / "launcher.sock").chmod(0o600)
        with Identity(65532, 65532).effective():
            async with sidecar(volume) as made:
                connecting = asyncio.create_task(made.launcher.run())
                while not made.launcher.unreachable:
                    await asyncio.wait_for(made.supervisor.dirty.wait(), ANSWER_S)
                    made.supervisor.dirty.clear()
                made._poll(100.0, 0.0)
                assert made.next_report().launcher_unreachable == "", "it may be starting"
                made._poll(100.0 + liveness.LIMIT_S, 0.0)
                said = made.next_report().launcher_unreachable
                await event_loop.end([connecting])
    assert said.startswith(f"the sidecar cannot connect to {volume / 'launcher.sock'}: Permission denied")
    assert "this process is user 65532" in said
    assert "belongs to user 0 and group 0, with mode 0600" in said

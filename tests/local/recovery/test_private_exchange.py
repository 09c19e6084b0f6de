"""Two and three ranks exchange their private states over gloo."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.local

RANKS = """
import os, sys, traceback
import torch.distributed as dist
from holdfast.errors import PeerLost
from holdfast.training.protection.private_exchange import PrivateStateRing

world_size, path = int(sys.argv[1]), sys.argv[2]
given = tuple(map(int, sys.argv[3].split(","))) if sys.argv[3] else ()
backups = given or tuple((rank + 1) % world_size for rank in range(world_size))


def be(rank):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world_size)
    mine = PrivateStateRing(rank, world_size, 1, backups=given)
    mine.connect("127.0.0.1")
    sources = [other for other in range(world_size) if backups[other] == rank]

    for step, size in enumerate((0, 1, 3000, 50_000_000)):  # the last is more than the kernel holds
        mine.send(step, bytes([rank]) * size, step % 2 == 1)
        found = {each.source: (each.blob, each.late) for each in mine.receive()}
        assert found == {each: (bytes([each]) * size, step % 2 == 1) for each in sources}, (rank, size)
    for step in (10, 11):  # one that is ahead: what it sends is kept for later
        mine.send(step, bytes([rank, step]), False)
        if rank == 0:
            dist.barrier()
        assert sorted(each.blob for each in mine.receive()) == [bytes([each, step]) for each in sources]
        if rank != 0:
            dist.barrier()
    if rank == 1:
        return
    try:
        while True:
            mine.send(20, b"x", False)
            mine.receive()
    except PeerLost as error:
        assert "rank 1" in str(error) or world_size > 2, error
    else:
        raise AssertionError("a peer that is gone was not noticed")


def forked(rank):  # from a process that has imported torch: that takes longer than all the rest
    pid = os.fork()
    if pid == 0:
        try:
            be(rank)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return pid


pids = [forked(rank) for rank in range(world_size)]
sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0 for pid in pids))
"""


@pytest.mark.parametrize(("world_size", "backups"), [(2, ""), (3, ""), (3, "2,2,0"), (4, "1,0,0,0")])
def test_private_states_arrive_complete_at_the_rank_that_keeps_them(
    world_size: int, backups: str, tmp_path: Path
) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", RANKS, str(world_size), str(tmp_path / "store"), backups],
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 0, ended.stderr

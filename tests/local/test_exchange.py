"""Two and three ranks that give each other their private states over gloo."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.local

RANK = """
import sys
import torch.distributed as dist
from holdfast.errors import PeerLost
from holdfast.exchange import Exchange

rank, world_size, nproc, path = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world_size)
mine = Exchange(rank, world_size, nproc)
mine.connect("127.0.0.1")
source = (rank - nproc) % world_size

for step, size in enumerate((0, 1, 3000, 50_000_000)):  # the last is more than the kernel holds
    mine.start(step, bytes([rank]) * size, step % 2 == 1)
    found = mine.finish()
    assert found == (bytes([source]) * size, step % 2 == 1), (rank, size, len(found[0]))
for step in (10, 11):  # one that is ahead: what it sends is kept for later
    mine.start(step, bytes([rank, step]), False)
    if rank == 0:
        dist.barrier()
    assert mine.finish() == (bytes([source, step]), False)
    if rank != 0:
        dist.barrier()
if rank == 1:
    sys.exit(0)
try:
    while True:
        mine.start(20, b"x", False)
        mine.finish()
except PeerLost as error:
    assert "rank 1" in str(error) or world_size == 3, error
else:
    raise AssertionError("a peer that is gone was not noticed")
"""


@pytest.mark.parametrize(("world_size", "nproc"), [(2, 1), (3, 1)])
def test_private_states_arrive_whole_at_the_rank_a_member_further(
    world_size: int, nproc: int, tmp_path: Path
) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(world_size), str(nproc), str(tmp_path / "store")],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]
    said = [rank.communicate(timeout=60)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * world_size, said

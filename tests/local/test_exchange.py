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
from holdfast.exchange import Exchange

rank, world_size, nproc, path = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world_size)
mine = Exchange(rank, world_size, nproc)
mine.agree(3000 * (rank + 1))
source = (rank - nproc) % world_size
for size in (0, 1, 3000, 3000 * world_size):
    for late in (False, True):
        found = mine.swap(bytes([rank]) * size, late)
        assert found == (bytes([source]) * size, late), (rank, size, found)
for _ in range(2):  # rank 0's state has outgrown the room: it has no second home, and nobody is held up
    found = mine.swap(bytes([rank]) * (1_000_000 if rank == 0 else 10), False)
    assert found == (None if source == 0 else (bytes([source]) * 10, False)), (rank, found)
dist.destroy_process_group()
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

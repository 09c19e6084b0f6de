"""A state of a gigabyte that two members write together, in bounded memory."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from holdfast.checkpoint.directory import DirectoryStorage
from holdfast.protocol.member_messages import StateSource
from tests.samples.checkpoints import newest_whole
from tests.unit.sidecar.memory import holdings, member
from tests.unit.sidecar.sharing.group import MIB, helper, hold, writer

pytestmark = pytest.mark.local
MOST_KB = 160 << 10


async def test_a_state_of_a_gigabyte_needs_little_memory(tmp_path: Path) -> None:
    """Both members are in this process, and have the same memory volume."""
    storage, most = DirectoryStorage(tmp_path), 0
    with member() as path:
        hold(path, 1024 * MIB)

        def anonymous() -> int:
            text = Path("/proc/self/status").read_text()
            return int(next(line.split()[1] for line in text.splitlines() if line.startswith("RssAnon")))

        async with helper(storage, path=path) as peer, writer(path, storage) as saver:
            (record,) = holdings(path).arena.records()
            before = anonymous()
            saving = asyncio.create_task(saver.save(record, [StateSource(peer.url, 0)], {}, asked=1))
            while not saving.done():
                most = max(most, anonymous() - before)
                await asyncio.sleep(0.01)
            await saving
            assert saver.durable.error == ""
            assert peer.pieces.written > 10
        found, _ = newest_whole(tmp_path)
        assert found is not None
        assert most < MOST_KB

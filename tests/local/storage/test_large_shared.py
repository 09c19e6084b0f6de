"""A state of a gigabyte that two members write together, in bounded memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.samples.checkpoints import newest_whole
from tests.unit.sidecar.memory import member

pytestmark = pytest.mark.local
MOST = 160 << 20
END_S = 100.0
# Both members are in this process, and have the same memory volume.
_MEMBERS = """
import asyncio, json, sys
from pathlib import Path
from holdfast.checkpoint.directory import DirectoryStorage
from holdfast.protocol.member_messages import StateSource
from tests.unit.sidecar.sharing.group import MIB, helper, hold, writer

def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("RssAnon")))

async def main(path, storage):
    record, most = hold(path, 1024 * MIB), 0
    async with helper(storage, path=path) as peer, writer(path, storage) as saver:
        before = anonymous()
        saving = asyncio.create_task(saver.save(record, [StateSource(peer.url, 0)], {}, asked=1))
        while not saving.done():
            most = max(most, anonymous() - before)
            await asyncio.sleep(0.01)
        await saving
        print(json.dumps([saver.durable.error, peer.pieces.written, most]))

asyncio.run(main(Path(sys.argv[1]), DirectoryStorage(Path(sys.argv[2]))))
"""


def test_a_state_of_a_gigabyte_needs_little_memory(tmp_path: Path) -> None:
    """This uses a separate process, because later processes inherit this process's peak memory."""
    with member() as path:
        ended = subprocess.run(
            [sys.executable, "-c", _MEMBERS, str(path), str(tmp_path)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            timeout=END_S,
        )
        assert ended.returncode == 0, ended.stderr
        error, pieces, most = json.loads(ended.stdout)
        assert (error, pieces > 10) == ("", True)
        assert most < MOST
        found, notes = newest_whole(tmp_path)
        assert found is not None
        assert notes == ()

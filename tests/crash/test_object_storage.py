"""A sidecar that is killed at any of its requests to object storage."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from holdfast.checkpoint.catalog import StoredCheckpoint
from holdfast.checkpoint.retention import Retention, retain
from tests.s3server.server import Fault, ObjectServer, Request, credentials, serving
from tests.unit.sidecar.storage.checkpoints import defects, save, steps
from tests.unit.sidecar.storage.conftest import storage_at

END_S = 60.0
# Replaces a checkpoint of an older generation, writes another one, and deletes all others.
_WRITER = """
import sys
from pathlib import Path
from holdfast.checkpoint.retention import Retention, retain
from tests.unit.sidecar.storage.checkpoints import save
from tests.unit.sidecar.storage.conftest import storage_at

storage = storage_at(sys.argv[1], Path(sys.argv[2]))
save(storage, 6, 2, epoch=2)
newest = save(storage, 8, 2, epoch=2)
retain(storage, Retention(1, epoch=2), frozenset({newest}))
"""
# Writes a checkpoint together with a peer, which has written the second part when the writer begins.
_SHARING_WRITER = """
import sys
from contextlib import contextmanager
from pathlib import Path
from holdfast.checkpoint import writer
from holdfast.checkpoint.retention import Retention, retain
from tests.unit.sidecar.storage.conftest import storage_at

storage, peer = (storage_at(sys.argv[1], Path(sys.argv[2])) for _ in range(2))
source = Path(sys.argv[2]).with_name("state")
with open(source, "wb") as file:
    file.write(b"begin")
    file.truncate(20 << 20)

class Helpers:
    @contextmanager
    def helping(self, place, work):
        first, piece = work.take(), work.take()
        content = memoryview(source.read_bytes())
        peer.write_piece("step-00000008", place, work.size, piece, lambda begin, end: content[begin:end])
        work.finish(piece, work.checksums(piece))
        work.give_back(first)
        yield

newest = writer.write(
    storage,
    generation=2,
    step=8,
    world_size=1,
    files={"replicated.safetensors": source, "rank-00000.bin": b"own"},
    meta={},
    created_at=0.0,
    epoch=2,
    helpers=Helpers(),
)
retain(storage, Retention(1, epoch=2), frozenset({newest}))
"""


def killed_at(server: ObjectServer, number: int, local: Path, program: str = _WRITER) -> bool:
    """Run the writer and kill it at its request `number`. Return False if it ended before that request."""
    count, started = itertools.count(1), threading.Event()

    def interfere(_: Request) -> Fault | None:
        if next(count) == number and started.wait(END_S):
            process.kill()
            process.wait(END_S)
        return None

    server.interfere = interfere
    environment = {**os.environ, **credentials(server.url), "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([sys.executable, "-c", program, server.url, str(local)], env=environment)
    started.set()
    status = process.wait(END_S)
    server.interfere = lambda _: None
    assert status in (0, -signal.SIGKILL)
    return status != 0


@pytest.mark.parametrize("program", [_WRITER, _SHARING_WRITER], ids=["alone", "shared"])
def test_a_writer_killed_at_any_request_leaves_whole_checkpoints_and_no_permanent_leftovers(
    tmp_path: Path, program: str
) -> None:
    number = 1
    while True:
        with serving(tmp_path / "objects") as server:
            storage = storage_at(server.url, tmp_path / "copies")
            save(storage, 5, 1, epoch=1)
            save(storage, 6, 1, epoch=1)
            was_killed = killed_at(server, number, tmp_path / "copies", program)
            found = [what for _, what in storage.each_checkpoint()]
            assert defects(storage) == [], f"after a kill at request {number}"
            for each in found:
                assert isinstance(each, StoredCheckpoint)
                assert storage.content_fault(each) is None, f"after a kill at request {number}"
            assert set(steps(storage).items()) & {(6, 1), (6, 2), (8, 2)}, f"after a kill at request {number}"
            newest = save(storage, 9, 3, epoch=3)
            retain(storage, Retention(1, epoch=3), frozenset({newest}))
            others = [key for key in server.filled() if "step-00000009" not in key]
            assert others == [], f"after a kill at request {number}"
        if not was_killed:
            break
        number += 1
    assert number > 15

"""A state of real size goes to object storage and back in bounded memory, with progress at each part."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.fileio.checksum import CHUNK_BYTES
from tests.s3server.server import credentials, serving

SIZE = 1_500_000_000
MEMORY = 250 << 20  # the sidecar of a pod has at least 512 MiB besides the snapshots
END_S = 110.0
_MEMBER = """
import json, sys
from pathlib import Path
from holdfast.checkpoint import writer
from tests.unit.sidecar.storage.checkpoints import STATE
from sidecar.storage.object_client import RequestLimits
from tests.unit.sidecar.storage.conftest import storage_at

url, source, local = sys.argv[1:]
storage, moves = storage_at(url, Path(local), RequestLimits()), []
moved = lambda: moves.append(1)
path = writer.write(
    storage,
    generation=1,
    step=7,
    world_size=1,
    files={STATE: Path(source)},
    meta={},
    created_at=0.0,
    moved=moved,
)
written = len(moves)
directory, wrong = storage.local_copy(storage.load(path.name), [STATE], moved)
# Not ru_maxrss: a process inherits that of the process that started it.
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
memory = int(status["VmHWM"].split()[0]) << 10
print(json.dumps([written, len(moves) - written, str(directory / STATE), wrong, memory]))
"""


def test_a_state_of_gigabytes_is_saved_and_copied_back(tmp_path: Path) -> None:
    if shutil.disk_usage(tmp_path).free < 4 * SIZE:
        pytest.skip(f"{4 * SIZE:,} bytes are needed below {tmp_path}")
    source = tmp_path / "snapshot"
    with open(
        source, "wb"
    ) as file:  # mostly a hole, which reads as zeros; each part differs in its first bytes
        for begin in range(0, SIZE, CHUNK_BYTES):
            file.seek(begin)
            file.write(os.urandom(4096))
        file.truncate(SIZE)
    with serving(tmp_path / "objects") as server:
        environment = {**os.environ, **credentials(server.url), "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(
            [sys.executable, "-c", _MEMBER, server.url, source, tmp_path / "copies"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=END_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        written, read, copy, wrong, memory = json.loads(done.stdout)
        parts = -(-SIZE // CHUNK_BYTES)
        assert (written, read, wrong) == (parts, parts, None)
        assert memory < MEMORY, f"{memory:,} bytes"
        with open(source, "rb") as one, open(copy, "rb") as other:
            while piece := one.read(CHUNK_BYTES):
                assert piece == other.read(CHUNK_BYTES)
            assert other.read(1) == b""
    shutil.rmtree(tmp_path / "copies")
    source.unlink()

"""Checkpoints are stored over a network that cuts connections to object storage, or stops all traffic."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.fileio.checksum import CHUNK_BYTES
from sidecar.storage.object_client import RequestLimits
from tests.s3server.proxy import Proxy, proxied
from tests.s3server.server import ObjectServer, credentials, serving
from tests.unit.sidecar.storage.checkpoints import PRIVATE, STATE, save, state, steps
from tests.unit.sidecar.storage.conftest import storage_at, variables


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ObjectServer]:
    with serving(tmp_path / "objects") as made, variables(credentials(made.url)):
        yield made


@pytest.fixture
def proxy(server: ObjectServer) -> Iterator[Proxy]:
    with proxied(server.port) as made:
        yield made


@pytest.mark.parametrize("stops", [False, True])
@pytest.mark.parametrize("direction", ["up", "down"])
def test_connections_that_break_in_the_middle_cost_only_their_parts(
    server: ObjectServer, proxy: Proxy, tmp_path: Path, direction: str, stops: bool
) -> None:
    limits = RequestLimits(
        connect_s=2.0,
        answer_s=1.0,
        write_s=1.0,
        read_s=2.0,
        stall_s=0.3,
        retry_s=20.0,
        first_pause_s=0.01,
    )
    storage = storage_at(proxy.url, tmp_path / "copies", limits)
    size = 5 * CHUNK_BYTES + 5
    proxy.of, proxy.stops = direction, stops
    if direction == "up":
        proxy.faulty, proxy.limit_bytes = 6, CHUNK_BYTES // 2
    save(storage, 7, size=size)
    assert steps(storage) == {7: 1}
    if direction == "down":
        proxy.faulty, proxy.limit_bytes = 6, CHUNK_BYTES // 2
        storage = storage_at(proxy.url, tmp_path / "copies", limits)  # opens new connections
    directory, wrong = storage.local_copy(storage.load("step-00000007"), (STATE, PRIVATE), lambda: None)
    assert wrong is None
    assert (directory / STATE).read_bytes() == state(7, 1, size)
    assert proxy.faults > 0

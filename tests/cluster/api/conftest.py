"""A client of the cluster that KUBECONFIG selects, and a namespace that is deleted after each test."""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import psutil
import pytest

from supervisor.kubernetes.client import ApiServer, connect
from tests.cluster.api.kinds import NAMESPACES

CLOSED_S = 5.0


@pytest.fixture
async def api() -> AsyncIterator[ApiServer]:
    if not os.environ.get("KUBECONFIG"):
        if os.environ.get("CI"):
            pytest.fail("KUBECONFIG is not set, and these tests are not skipped in CI")
        pytest.skip("needs a Kubernetes API server: set KUBECONFIG to an administrator's kubeconfig")
    async with await connect() as server:
        yield server
    await _connections_closed(urlsplit(server._access.url).port or 443)


async def _connections_closed(port: int) -> None:
    """Wait for the end of TLS connections, which close after an exchange with the server.

    The loop ends after the test. A connection that is still open then is reported in a later test.
    """
    give_up_s = time.monotonic() + CLOSED_S
    while any(each.raddr and each.raddr.port == port for each in psutil.Process().net_connections()):
        if time.monotonic() > give_up_s:
            break
        await asyncio.sleep(0.01)


@pytest.fixture
async def namespace(api: ApiServer) -> AsyncIterator[str]:
    # Not "holdfast-": the test of the demo, which runs at the same time, counts those.
    name = f"api-test-{uuid.uuid4().hex[:8]}"
    await api.create(NAMESPACES, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    try:
        yield name
    finally:
        await api.delete(NAMESPACES, name)

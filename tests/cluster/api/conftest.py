"""A client of the cluster that KUBECONFIG names, and a namespace that is deleted after each test."""

from __future__ import annotations

import os
import uuid
from collections.abc import AsyncIterator

import pytest

from supervisor.kubernetes.client import ApiServer, connect
from tests.cluster.api.kinds import NAMESPACES


@pytest.fixture
async def api() -> AsyncIterator[ApiServer]:
    if not os.environ.get("KUBECONFIG"):
        if os.environ.get("CI"):
            pytest.fail("KUBECONFIG is not set, and these tests are not skipped in CI")
        pytest.skip("needs a Kubernetes API server: set KUBECONFIG to an administrator's kubeconfig")
    async with await connect() as server:
        yield server


@pytest.fixture
async def namespace(api: ApiServer) -> AsyncIterator[str]:
    name = f"holdfast-test-{uuid.uuid4().hex[:8]}"
    await api.create(NAMESPACES, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    try:
        yield name
    finally:
        await api.delete(NAMESPACES, name)

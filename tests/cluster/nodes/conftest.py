"""Node agents with GPUs that the tests of a module can break."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.apparatus import fake_gpus
from tests.cluster.apparatus.fake_gpus import Agents
from tests.cluster.apparatus.kubernetes_cluster import ClusterUnderTest, is_lent
from tests.fakenvml import build


@pytest.fixture(scope="module")
def agents(installed: ClusterUnderTest) -> Iterator[Agents]:
    """Yield the agents, restarted with two healthy GPUs each and without a kernel log."""
    if is_lent():
        pytest.skip("HOLDFAST_INSTALLED=1: others use what is installed")
    try:
        found = fake_gpus.break_in(installed)
    except build.NoCompiler as error:
        pytest.skip(str(error))
    yield found
    fake_gpus.restore(installed)

"""A fixture that forms a process group of this single process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from trainer.group import leave


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    leave()

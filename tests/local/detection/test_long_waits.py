"""A rank waits for its peers for longer than any limit that a user sets: only a peer can be hung.

The group, its store and the exchange of private states once had a built-in limit of 300 s. If one rank needed
more than five minutes for a first batch, a compilation or a download, the other ranks' collective failed, no
matter how long `--first-step-timeout` was.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.local.conftest import Start

pytestmark = [pytest.mark.local, pytest.mark.timeout(150)]

SCRIPT = """
import torch
import torch.distributed.distributed_c10d as c10d
from torch import nn
import holdfast

session = holdfast.join()
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
state = session.protect(model=model, optimizer=optimizer)
for step in state.steps(3):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    state.commit()
limits = {
    "group": c10d._get_default_group()._get_backend(torch.device("cpu")).options._timeout.total_seconds(),
    "store": c10d._get_default_store().timeout.total_seconds(),
    "exchange": state._protection.backup._peer._limit_s,
}
for name, limit_s in limits.items():
    print(f"{name} waits {limit_s:.0f} s", flush=True)
"""


@pytest.mark.parametrize(("options", "least_s"), [("", 86_400), ("--first-step-timeout 20h", 144_000)])
def test_no_limit_between_ranks_is_below_the_users_limits(
    start: Start, tmp_path: Path, options: str, least_s: int
) -> None:
    (tmp_path / "waits.py").write_text(SCRIPT)
    ended = start(f"--members 2 {options}", "waits.py").finish()
    assert ended.code == 0, ended.output
    for name in ("group", "store", "exchange"):
        assert ended.output.count(f"{name} waits {least_s} s") == 2, ended.output

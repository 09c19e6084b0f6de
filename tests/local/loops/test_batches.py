"""Epochs over a DataLoader with workers: bit-for-bit the same results after a kill as without one."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.local.conftest import Start

pytestmark = [pytest.mark.local, pytest.mark.timeout(200)]

STEPS = 120  # ten epochs of twelve steps


@pytest.fixture(scope="module")
def undisturbed(start_shared: Start, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    digest = tmp_path_factory.mktemp("undisturbed") / "digest"
    ended = start_shared("--nproc-per-node 2", "epochs.py", STEPS, "none", digest).finish()
    assert ended.code == 0, ended.output
    return digests(digest)


def digests(path: Path) -> list[str]:
    return [path.with_name(f"{path.name}.{rank}").read_text() for rank in (0, 1)]


@pytest.mark.parametrize(
    ("method", "loop"), [("fork", "steps"), ("spawn", "steps"), ("fork", "zip"), ("none", "piz")]
)
def test_the_weights_equal_those_of_the_undisturbed_run_with_any_loader_and_loop(
    start: Start, tmp_path: Path, undisturbed: list[str], method: str, loop: str
) -> None:
    digest = tmp_path / "digest"
    run = start("--nproc-per-node 2 --hang-floor 60s", "epochs.py", STEPS, method, digest, loop)
    run.reach(20)
    run.hit(1, signal.SIGKILL)
    ended = run.finish()
    assert ended.code == 0, ended.output
    (found,) = run.incidents()
    assert (found["kind"], found["rank"]) == ("crash", 1)
    assert digests(digest) == undisturbed

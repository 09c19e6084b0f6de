"""Without a supervisor, a real launcher ends with the exit code of its rank, and the sidecar decides when."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from holdfast.process import event_loop
from holdfast.protocol.launcher_messages import Launch, RankStart
from holdfast.protocol.member_messages import MemberOrder
from sidecar.config import Config
from sidecar.reconciler import Sidecar
from sidecar.watch.unsupervised import LIMIT_S
from tests.unit.sidecar.memory import member

ANSWER_S = 60.0
ROOT = Path(__file__).parents[3]
TRAINS = ("import time; time.sleep(3600)",)


async def until(sidecar: Sidecar, condition: Callable[[], object]) -> None:
    """Return once `condition` holds. It is checked after each change that the sidecar would report."""

    async def wait() -> None:
        while not condition():
            sidecar.supervisor.dirty.clear()
            await sidecar.supervisor.dirty.wait()

    await asyncio.wait_for(wait(), ANSWER_S)


@asynccontextmanager
async def pod(
    here: Path, command: tuple[str, ...]
) -> AsyncIterator[tuple[Sidecar, asyncio.subprocess.Process]]:
    """Run a launcher and, in this process, its sidecar. Its supervisor has ordered a run and is gone."""
    (here / "token").write_text("secret\n")
    made = Sidecar(
        Config("m0", "n0", 1, here, here / "c", "http://127.0.0.1:9", here / "token", address="127.0.0.1")
    )
    words = ("-m", "holdfast", "launch", "--directory", here, "--logs", here / "logs", "--name", "m0")
    launcher = await asyncio.create_subprocess_exec(
        sys.executable, *words, "--", "env", sys.executable, "-c", *command, cwd=ROOT
    )
    services = [asyncio.create_task(work()) for work in (made.launcher.run, made.pursue)]
    try:
        await until(made, lambda: made.launcher.state is not None)
        launch = Launch(1, 1, 1, "127.0.0.1", 29500, 0, 0.0)
        await made.obey(MemberOrder("run", 1, launch, (RankStart(0, 0),), epoch=3))
        made.supervisor.alone_since_s = time.monotonic()
        await until(made, lambda: _ranks(made))
        yield made, launcher
    finally:
        if launcher.returncode is None:
            launcher.kill()
        await launcher.wait()
        await event_loop.end(services)
        await made.peers.close()


def _ranks(made: Sidecar) -> list[str]:
    """Return the states of the ranks whose processes have been started."""
    state = made.launcher.state
    return [each.state for each in state.ranks if each.pid] if state is not None else []


@pytest.mark.parametrize(
    ("command", "killed", "code"),
    [
        pytest.param(TRAINS, True, 137, id="killed"),
        pytest.param(("import sys; sys.exit(7)",), False, 7, id="failed"),
        pytest.param(("pass",), False, 0, id="finished"),
    ],
)
async def test_the_container_ends_with_the_code_of_its_rank_at_the_limit_and_not_before(
    command: tuple[str, ...], killed: bool, code: int
) -> None:
    with member() as here:
        async with pod(here, command) as (made, launcher):
            if killed:
                assert made.launcher.state is not None
                os.kill(made.launcher.state.ranks[0].pid, signal.SIGKILL)
            await until(made, lambda: _ranks(made) == ["exited"])
            begun_s = time.monotonic()
            made._poll(begun_s, 0.0)
            made._poll(begun_s + LIMIT_S - 1.0, 0.0)
            assert launcher.returncode is None
            made._poll(begun_s + LIMIT_S, 0.0)
            assert await asyncio.wait_for(launcher.wait(), ANSWER_S) == code

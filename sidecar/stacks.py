"""Ask a hung training process where it is, from outside and without disturbing it."""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

from holdfast import osproc, progress
from holdfast.messages import Look

LIMIT_S = 3.0  # py-spy needs about 11 ms; a process in uninterruptible sleep may not answer at all
WINDOW_S = 0.1  # over which CPU use is measured: enough ticks (10 ms) to tell spinning from sleeping
_MAX_STACK = 20_000


async def look_at(found: progress.Progress) -> Look:
    """Return the evidence about one rank. Never raises for a sick target."""
    state, before_s = osproc.state_of(found.pid)
    stack, _ = await asyncio.gather(dump(found.pid), asyncio.sleep(WINDOW_S))
    _, after_s = osproc.state_of(found.pid)
    return Look(
        rank=found.rank,
        step=found.step,
        phase=int(found.phase),
        phase_seq=found.phase_seq,
        process_state=state,
        cpu_s=round(after_s - before_s, 3),
        stack=stack[:_MAX_STACK],
    )


async def look_at_all(found: Iterable[progress.Progress]) -> tuple[Look, ...]:
    return tuple(await asyncio.gather(*(look_at(each) for each in found)))


async def dump(pid: int) -> str:
    """Return the Python stacks of `pid`, or one line saying why there are none."""
    command = _py_spy()
    if command is None:
        return "no stack: py-spy is not installed beside this Python"
    try:
        process = await asyncio.create_subprocess_exec(
            command, "dump", "--nonblocking", "--pid", str(pid),
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
    except OSError as error:
        return f"no stack: cannot start py-spy: {error}"
    try:
        out, err = await asyncio.wait_for(process.communicate(), LIMIT_S)
    except asyncio.TimeoutError:
        return f"no stack: py-spy gave no answer in {LIMIT_S:g} s"
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        return f"no stack: {err.decode(errors='replace').strip()}"
    return out.decode(errors="replace")


def _py_spy() -> str | None:
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.exists() else shutil.which("py-spy")

"""An event loop whose clock jumps to the next timer as soon as no task is ready."""

from __future__ import annotations

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec

_P = ParamSpec("_P")
LIMIT_S = 10.0  # real time for work in threads


class _Jumping(selectors.DefaultSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now_s = 1000.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(LIMIT_S if timeout is None else 0)
        if timeout is None and not ready:
            raise RuntimeError("nothing is left that could happen")
        if not ready and timeout:
            self.now_s += timeout
        return ready


class _SimulatedLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s


def simulated(test: Callable[_P, Coroutine[Any, Any, None]]) -> Callable[_P, None]:
    """Run the test in simulated time, which begins at 1000 s."""

    @functools.wraps(test)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> None:
        loop = _SimulatedLoop()
        try:
            loop.run_until_complete(test(*args, **kwargs))
        finally:
            loop.run_until_complete(_end_others())
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()

    return run


async def _end_others() -> None:
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)


def now_s() -> float:
    return asyncio.get_running_loop().time()

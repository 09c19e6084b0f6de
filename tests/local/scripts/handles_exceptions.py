"""Handle two exceptions on rank 0, within a pause, for longer than an inspection takes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from tiny_model import train

wait = threading.Event().wait


class Swallow:
    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> bool:
        wait(1.5)
        return True


def batches() -> Iterator[int]:
    try:
        while True:
            yield 1
    finally:
        wait(1.5)  # a pool whose workers finish what they load


def after(step: int, state: Any) -> None:
    if state.step != 20 or dist.get_rank() != 0:
        return
    with state.pause("eval", limit_s=600):
        for _ in batches():
            break
    with Swallow():
        raise OSError("transient")


train(60, after=after)

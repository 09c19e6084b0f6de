"""A dataset whose workers start slowly, as when they import a large package or read from a slow disk."""

from __future__ import annotations

import time

import torch


class Data(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((32,), float(index))


class Slowly:
    """Initialize a worker slowly: it takes `seconds`."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, _worker: int) -> None:
        time.sleep(self.seconds)

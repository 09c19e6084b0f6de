"""Make all runs of a trainer bit-identical, including resumed runs."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import random
from types import ModuleType

import torch


def deterministic() -> None:
    """Make torch use deterministic kernels, and raise an error for operations that have none.

    Call this before using CUDA, because cuBLAS reads its variable only once, when it starts.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Filling uninitialized memory, the default, helps to find bugs but writes each new tensor twice.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False  # benchmarking may select a different kernel in each run


def mix(*words: int) -> int:
    """Return a seed derived from `words`, such as a seed and a rank; similar words yield unrelated seeds."""
    text = ",".join(map(str, words)).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:4], "big")  # 32 bits, the maximum for NumPy


def seed_everything(seed: int, rank: int) -> None:
    """Seed all random generators of this process, differently on each rank."""
    value = mix(seed, rank)
    random.seed(value)
    torch.manual_seed(value)  # for the CPU and each GPU
    numpy = numpy_if_installed()
    if numpy is not None:
        numpy.random.seed(value)


def numpy_if_installed() -> ModuleType | None:
    return importlib.import_module("numpy") if importlib.util.find_spec("numpy") else None

"""What makes two runs of a trainer equal bit for bit, and a resumed run equal to both."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import random
from types import ModuleType

import torch


def deterministic() -> None:
    """Have torch use deterministic kernels; raise where an operation has none. Call before CUDA."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it once, at start
    torch.use_deterministic_algorithms(True)
    # On by default; finds bugs, for one more write of each new tensor.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False  # it picks kernels by the clock


def mix(*words: int) -> int:
    """Return a seed for these words: related words (seed 0, rank 1) give unrelated seeds."""
    text = ",".join(map(str, words)).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:4], "big")  # 32 bits: all that NumPy takes


def seed_everything(seed: int, rank: int) -> None:
    """Start all random states of this process anew, each rank on a stream of its own."""
    value = mix(seed, rank)
    random.seed(value)
    torch.manual_seed(value)  # the CPU's and each GPU's
    numpy = numpy_if_installed()
    if numpy is not None:
        numpy.random.seed(value)


def numpy_if_installed() -> ModuleType | None:
    return importlib.import_module("numpy") if importlib.util.find_spec("numpy") else None

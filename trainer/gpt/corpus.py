"""Load the text to train on: the bytes of the files in a directory, split into samples."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from trainer.options import BadValue

VALIDATION_SHARE = 16  # every 16th sample is reserved for validation
# Directories in the standard library's folder that do not belong to it.
NOT_STDLIB = frozenset({"site-packages", "dist-packages"})


@dataclass(frozen=True, slots=True)
class Corpus:
    """Samples as uint8 tensors of shape (samples, context + 1)."""

    train: Tensor
    validation: Tensor


def load(data: Path | None, *, context: int, max_bytes: int) -> Corpus:
    """Return samples from the first `max_bytes` bytes of the files in `data`.

    If `data` is None, the standard library's sources are read. The same files always yield the same samples.
    Raises `BadValue` if the directory cannot be read or contains too little text.
    """
    suffix = "" if data else ".py"
    folder = data or Path(sysconfig.get_path("stdlib"))
    if not folder.is_dir():
        raise BadValue(f"--data: {folder} is not a directory")
    text = _read(folder, suffix, max_bytes)
    if len(text) < (context + 1) * VALIDATION_SHARE:
        raise BadValue(
            f"--data: {folder} has {len(text)} bytes in readable files;"
            f" --context {context} needs {(context + 1) * VALIDATION_SHARE} or more"
        )
    return split(torch.frombuffer(text, dtype=torch.uint8), context)


def split(text: Tensor, context: int) -> Corpus:
    """Split `text` into samples that overlap by one byte, and reserve some of them for validation."""
    samples = text.unfold(0, context + 1, context)
    aside = torch.arange(len(samples)) % VALIDATION_SHARE == VALIDATION_SHARE - 1
    return Corpus(train=samples[~aside], validation=samples[aside])


def _read(folder: Path, suffix: str, max_bytes: int) -> bytearray:
    text = bytearray()
    for path in _files(folder, suffix):
        try:
            with path.open("rb") as file:
                text += file.read(max_bytes - len(text))
        except OSError as error:
            raise BadValue(f"--data: cannot read {path}: {error.strerror}") from error
        if len(text) >= max_bytes:
            break
    return text


def _files(folder: Path, suffix: str) -> Iterator[Path]:
    """Yield the files below `folder` in the order of their names, except hidden files."""
    try:
        paths = sorted(folder.iterdir())
    except OSError as error:
        raise BadValue(f"--data: cannot read {folder}: {error.strerror}") from error
    for path in paths:
        if path.name.startswith("."):
            continue
        if path.is_dir():
            if path.name not in NOT_STDLIB and not path.is_symlink():  # links can form a cycle
                yield from _files(path, suffix)
        elif path.name.endswith(suffix) and path.is_file():
            yield path

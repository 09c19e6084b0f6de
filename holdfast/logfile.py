"""Files that processes print into. Storage that is away costs what they print, never the process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO


def opened(path: Path) -> BinaryIO:
    """Return `path`, made with its folder where they are missing, open for writing at its end.

    Where that is not possible (storage that is full, away or read-only), what nobody reads instead.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("ab")
    except OSError:
        return Path(os.devnull).open("ab")

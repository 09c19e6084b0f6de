"""Train 20 steps, and write a line about each to files that nothing closes: python SCRIPT FOLDER."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

from tiny_model import train

import holdfast

folder = Path(sys.argv[1])


class Record:
    def __init__(self, path: Path) -> None:
        self._file = path.open("w")

    def add(self, step: int) -> None:
        self._file.write(f"{step}\n")

    def __del__(self) -> None:
        self._file.write("the end\n")


def after(step: int, _: Any) -> None:
    log.write(f"{step}\n")
    rows.writerow([step])
    record.add(step)


rank = holdfast.join().rank
log = (folder / f"log.{rank}").open("w")
rows = csv.writer((folder / f"rows.{rank}").open("w", newline=""), lineterminator="\n")
record = Record(folder / f"record.{rank}")
train(20, after=after)

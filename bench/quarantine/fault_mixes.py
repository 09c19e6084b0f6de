"""Published mixes of faults, as rates for a fleet of any size. The figures are in `fault_mixes.csv`."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).with_suffix(".csv")
GPUS_PER_NODE = 8
FLEETS = {  # nodes, days
    "llama3": (16_384 / GPUS_PER_NODE, 54.0),
    "byterobust": (200_000 / GPUS_PER_NODE, 91.0),
}
YEAR_S = 365 * 86400.0


@dataclass(frozen=True, slots=True)
class FaultRate:
    """One kind of fault and its rate. The comments at the top of the CSV file explain the fields."""

    mix: str
    component: str
    kind: str
    action: str
    sources: tuple[str, ...]
    driver: bool
    delay_s: float
    lasts_s: float
    clears_s: float
    per_node_year: float


def load(mixes: tuple[str, ...]) -> list[FaultRate]:
    with FILE.open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(line for line in file if not line.startswith("#"))
        return [_rate(row) for row in rows if row["mix"] in mixes]


def _rate(row: dict[str, str]) -> FaultRate:
    nodes, days = FLEETS[row["mix"]]
    return FaultRate(
        row["mix"],
        row["component"],
        row["kind"],
        row["action"],
        tuple(each for each in row["sources"].split("+") if each),
        row["driver"] == "1",
        float(row["delay_s"]),
        float(row["lasts_s"]),
        float(row["clears_s"]),
        int(row["count"]) / nodes * 365.0 / days,
    )

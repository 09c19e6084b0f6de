"""The defaults follow from the published figures, which `bench` uses too."""

from __future__ import annotations

import csv

from supervisor.planning import published
from tests.unit.literals import ROOT


def _llama_3() -> list[dict[str, str]]:
    text = (ROOT / "bench" / "quarantine" / "fault_mixes.csv").read_text()
    rows = csv.DictReader(line for line in text.splitlines() if not line.startswith("#"))
    return [row for row in rows if row["mix"] == "llama3"]


def test_the_interruptions_are_those_of_the_table_of_faults() -> None:
    assert sum(int(row["count"]) for row in _llama_3()) == published.LLAMA_3_INTERRUPTIONS
    assert (
        sum(int(row["count"]) for row in _llama_3() if row["kind"] != "none") == published.LLAMA_3_NODE_LOSSES
    )


def test_a_job_of_the_same_size_has_the_same_number_of_faults() -> None:
    nodes = published.LLAMA_3_GPUS / published.GPUS_PER_NODE
    faults = published.LLAMA_3_DAYS * published.DAY_S * nodes / published.MTBF_S
    assert round(faults) == published.LLAMA_3_INTERRUPTIONS
    assert abs(faults * published.NODE_LOSS - published.LLAMA_3_NODE_LOSSES) < 3


def test_storage_of_the_same_size_writes_two_terabytes_per_second() -> None:
    assert published.BANDWIDTH_PER_GPU * published.LLAMA_3_GPUS == 2e12

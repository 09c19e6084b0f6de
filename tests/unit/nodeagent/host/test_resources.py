from __future__ import annotations

import os
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from nodeagent.host import resources
from nodeagent.host.resources import FIGURES, ResourceUsage
from tests.unit.nodeagent.host.procs import Procs

ANY = st.binary(max_size=80)


def test_the_four_figures_of_a_node(tmp_path: Path) -> None:
    Procs(tmp_path)
    tables = ResourceUsage(str(tmp_path))
    found = {each.check: each.value for each in tables.read(tables.checks, 0.0)}
    cores = os.sysconf("SC_NPROCESSORS_ONLN")
    assert found == {
        "memory_used": 75.0,
        "files_used": 10.0,
        "pids_used": 10.0,
        "load": round(1.5 / cores, 3),
    }
    assert tables.left_out() == ()


def test_a_file_that_says_nothing_is_left_out_until_it_does(tmp_path: Path) -> None:
    procs = Procs(tmp_path)
    tables = ResourceUsage(str(tmp_path))
    procs.write("meminfo", b"N/A")
    (tmp_path / "loadavg").unlink()
    assert {each.check for each in tables.read(tables.checks, 0.0)} == {"files_used"}
    assert {each.what for each in tables.left_out()} == {"memory_used", "load", "pids_used"}
    Procs(tmp_path)
    tables.read(tables.checks, 5.0)
    assert tables.left_out() == ()


def test_only_what_is_due_is_read(tmp_path: Path) -> None:
    Procs(tmp_path)
    assert [
        each.check for each in ResourceUsage(str(tmp_path)).read(frozenset({"load", "disk_used"}), 0.0)
    ] == ["load"]


@given(st.lists(ANY, min_size=3, max_size=3))
def test_no_bytes_make_a_figure_raise(raw: list[bytes]) -> None:
    for figure in FIGURES.values():
        found = figure.value(*raw[: len(figure.files)])
        assert found is None or found >= 0


def test_limits_of_nothing_and_figures_without_end_say_nothing() -> None:
    assert resources.files_used(b"5 0 0") is None
    assert resources.files_used(b"5 0 " + b"9" * 5000) is None
    assert resources.pids_used(b"0 0 0 1/5 9", b"0", b"100") is None
    assert resources.load_per_core(b"0 inf 0", 4) is None
    assert resources.load_per_core(b"0 nan 0", 4) is None
    assert resources.memory_used(b"MemTotal: 0 kB\nMemAvailable: 0 kB") is None


def test_the_lower_of_two_limits_of_process_ids_counts() -> None:
    assert resources.pids_used(b"0 0 0 1/50 9", b"4194304", b"100") == 50.0
    assert resources.pids_used(b"0 0 0 1/50 9", b"200", b"N/A") == 25.0

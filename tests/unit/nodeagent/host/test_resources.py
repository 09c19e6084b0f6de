from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nodeagent.host import resources
from nodeagent.host.resources import FIGURES, ResourceUsage
from tests.unit.nodeagent.host.procs import MEMINFO, Procs

ANY = st.binary(max_size=80)


def test_the_four_values_of_a_node_are_computed(tmp_path: Path) -> None:
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


def test_a_malformed_file_is_omitted_until_it_is_readable(tmp_path: Path) -> None:
    procs = Procs(tmp_path)
    tables = ResourceUsage(str(tmp_path))
    procs.write("meminfo", b"N/A")
    (tmp_path / "loadavg").unlink()
    assert {each.check for each in tables.read(tables.checks, 0.0)} == {"files_used"}
    assert {each.what for each in tables.left_out()} == {"memory_used", "load", "pids_used"}
    Procs(tmp_path)
    tables.read(tables.checks, 5.0)
    assert tables.left_out() == ()


def test_only_due_checks_are_read(tmp_path: Path) -> None:
    Procs(tmp_path)
    assert [
        each.check for each in ResourceUsage(str(tmp_path)).read(frozenset({"load", "disk_used"}), 0.0)
    ] == ["load"]


@given(st.lists(ANY, min_size=3, max_size=3))
@example([b"MemTotal:", b"", b""])
@example([b"MemTotal: x kB", b"", b""])
@example([b"MemTotal: " + b"9" * 5000, b"", b""])
@example([b"MemFree: 5 kB", b"", b""])
def test_no_bytes_make_a_value_raise_an_exception(raw: list[bytes]) -> None:
    with TemporaryDirectory() as folder:
        procs = Procs(Path(folder))
        for figure in FIGURES.values():
            for name, content in zip(figure.files, raw, strict=False):
                procs.write(name, content)
            found = figure.value(folder)
            assert found is None or found >= 0


def test_zero_limits_and_oversized_numbers_have_no_value() -> None:
    assert resources.files_used(b"5 0 0") is None
    assert resources.files_used(b"5 0 " + b"9" * 5000) is None
    assert resources.pids_used(b"0 0 0 1/5 9", b"0", b"100") is None
    assert resources.load_per_core(b"0 inf 0", 4) is None
    assert resources.load_per_core(b"0 nan 0", 4) is None


def test_memory_of_size_zero_has_no_value(tmp_path: Path) -> None:
    Procs(tmp_path).write("meminfo", MEMINFO.replace(b"1000 kB", b"0 kB"))
    assert resources.memory_used(str(tmp_path)) is None


def test_memory_is_read_from_the_given_procfs(tmp_path: Path) -> None:
    Procs(tmp_path / "host")
    Procs(tmp_path / "other").write("meminfo", MEMINFO.replace(b"250 kB", b"900 kB"))
    assert resources.memory_used(str(tmp_path / "host")) == 75.0
    assert resources.memory_used(str(tmp_path / "other")) == 10.0
    assert resources.memory_used(str(tmp_path / "none")) is None


def test_the_value_for_this_machine_agrees_with_its_meminfo() -> None:
    said = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    total, available = (int(said[name].split()[0]) for name in ("MemTotal", "MemAvailable"))
    found = resources.memory_used("/proc")
    assert found is not None
    assert abs(found - 100 * (total - available) / total) < 5


def test_the_lower_of_the_two_limits_of_process_ids_counts() -> None:
    assert resources.pids_used(b"0 0 0 1/50 9", b"4194304", b"100") == 50.0
    assert resources.pids_used(b"0 0 0 1/50 9", b"200", b"N/A") == 25.0


@pytest.mark.parametrize(
    ("available", "used"),
    [
        (b"MemAvailable:   250 kB\n", 75.0),
        (
            b"MemAvailable:  2000 kB\n",
            40.0,
        ),  # more than there is, as in some containers
        (b"", 40.0),  # a kernel before 3.14
    ],
)
def test_psutil_estimates_the_available_memory_if_the_kernel_does_not(
    tmp_path: Path, available: bytes, used: float
) -> None:
    rest = b"MemTotal: 1000 kB\nMemFree: 600 kB\n"
    rest += b"".join(
        b"%b: 0 kB\n" % each for each in (b"Buffers", b"Cached", b"Shmem", b"Active", b"Inactive")
    )
    Procs(tmp_path).write("meminfo", rest + available)
    assert resources.memory_used(str(tmp_path)) == used

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bench.harness import memory_needs
from bench.harness.launchers import Failed
from bench.harness.results import ROOT
from bench.text import size_of
from holdfast.protocol.member_messages import MemoryUse
from sidecar.state import memory_limits
from tests.local.waiting import until

THERE = MemoryUse("here", 0, 0, 0, 10_000_000_000, 20_000_000_000)


def test_states_that_fit_are_not_refused() -> None:
    assert memory_needs.refusal("--state", 3_000_000_000, 3, 2, 0, THERE) is None
    assert memory_needs.refusal("--state", 0, 3, 2, 0, THERE) is None


@pytest.mark.parametrize(
    ("there", "other_bytes"),
    [
        (THERE, 0),
        (replace(THERE, available_bytes=8_000_000_000), 0),
        (THERE, 9_000_000_000),
        (replace(THERE, free_bytes=1_000_000_000), 0),
    ],
)
def test_states_that_do_not_fit_are_refused_with_a_size_that_does(there: MemoryUse, other_bytes: int) -> None:
    said = memory_needs.refusal("--state", 30_000_000_000, 3, 2, other_bytes, there)
    assert said is not None
    assert said.startswith("--state 30 GB takes ")
    assert "\n" not in said
    words = said.split()
    would = size_of(words[words.index("would") - 1])
    assert memory_needs.refusal("--state", would, 3, 2, other_bytes, there) is None
    assert memory_needs.refusal("--state", would + 20_000_000, 3, 2, other_bytes, there) is not None


def test_the_limit_of_a_cgroup_is_named() -> None:
    tight = replace(THERE, available_bytes=1_000_000_000, limit_bytes=4_000_000_000)
    said = memory_needs.refusal("--frozen", 30_000_000_000, 3, 2, 0, tight)
    assert said is not None
    assert "1 GB is free under the memory limit of 4 GB of the cgroup" in said
    none = memory_needs.refusal("--frozen", 10_000_000, 3, 2, 0, replace(tight, available_bytes=0))
    assert none is not None
    assert none.endswith("; nothing would fit")


def test_the_check_reads_the_limits_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_limits, "measure", lambda *_: THERE)
    memory_needs.check("--state", 1_000_000_000, 3, 2)
    with pytest.raises(Failed, match="--state 30 GB takes"):
        memory_needs.check("--state", 30_000_000_000, 3, 2)


def test_a_bench_that_does_not_fit_ends_with_one_line() -> None:
    words = [sys.executable, "-m", "bench", "transfer", "--state", "900000G"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert len(done.stderr.splitlines()) == 1
    assert "would fit" in done.stderr


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_bench_that_is_terminated_leaves_no_memory_behind(signum: int) -> None:
    words = [sys.executable, "-m", "bench", "transfer", "--state", "50M", "--rounds", "100000"]

    def heard() -> None:  # our parent may ignore the signal, as a shell does for background jobs
        signal.signal(signum, signal.SIG_DFL)

    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True, preexec_fn=heard) as bench:
        try:
            said = bench.stdout
            assert said is not None
            until(lambda: "slot" in said.readline() or None, "it measures", 60.0)
            [folder] = memory_needs.MEMORY.glob(f"bench-transfer-{bench.pid}-*")
            os.kill(bench.pid, signum)
            until(lambda: _ignores(bench.pid, signum) or None, "the first signal is heard", 60.0)
            os.kill(bench.pid, signum)  # a second signal must not interrupt the removal
            said.read()
            assert bench.wait(60.0) == 130
        finally:
            bench.kill()
    assert not folder.exists()


def _ignores(pid: int, signum: int) -> bool:
    """True if the process ignores the signal or is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return True
    found = next((line.split()[1] for line in lines if line.startswith("SigIgn:")), "f" * 16)
    return bool(int(found, 16) >> (signum - 1) & 1)

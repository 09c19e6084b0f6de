"""The probe of a pod's sidecar, as the kubelet runs it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from holdfast.process import event_loop
from holdfast.snapshot import member_directory
from sidecar import __main__ as program
from supervisor.admission import pod_layout

LIMIT_S = 20.0


def is_healthy(file: Path) -> bool:
    """Run the probe's command on another file; return whether it succeeds."""
    probe: dict[str, Any] = pod_layout.ALIVE_PROBE
    words = [word.replace(pod_layout.ALIVE, str(file)) for word in probe["exec"]["command"]]
    return subprocess.run(words, capture_output=True, timeout=LIMIT_S, check=False).returncode == 0


def test_the_sidecar_and_its_probe_mean_the_same_file() -> None:
    assert f"{pod_layout.MEMORY}/{member_directory.ALIVE}" == pod_layout.ALIVE


def test_the_probe_fails_only_if_the_file_is_more_than_a_minute_old(tmp_path: Path) -> None:
    file = tmp_path / "alive"
    assert is_healthy(file), "the sidecar is starting"
    file.touch()
    for age_s, expected in ((0, True), (50, True), (90, False), (86_400, False), (-3600, True)):
        os.utime(file, (time.time() - age_s,) * 2)
        assert is_healthy(file) == expected, f"{age_s} s old"


async def test_a_running_event_loop_keeps_the_file_young(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "ALIVE_S", 0.001)
    touch, touched = program._touch, asyncio.Event()

    def observed(file: Path) -> None:
        touch(file)
        touched.set()

    monkeypatch.setattr(program, "_touch", observed)
    file = tmp_path / "alive"
    running = asyncio.create_task(program.show_life(file))
    for _ in range(2):
        await asyncio.wait_for(touched.wait(), LIMIT_S)
        assert is_healthy(file)
        os.utime(file, (1, 1))
        assert not is_healthy(file)
        touched.clear()
    await event_loop.end([running])


async def test_a_volume_that_is_gone_does_not_end_the_sidecar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "ALIVE_S", 0.0)
    running = asyncio.create_task(program.show_life(tmp_path / "none" / "alive"))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not running.done()
    await event_loop.end([running])

"""Each rank gets its own devices. The environment shows this, even on a machine without devices."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.local.conftest import Start
from tests.local.running import Run
from tests.local.waiting import until

pytestmark = [pytest.mark.local, pytest.mark.timeout(150)]

DEALT = {"HOLDFAST_DEVICES": "0,GPU-7", "CUDA_VISIBLE_DEVICES": "0,GPU-7"}


def seen(run: Run, folder: Path, generation: int) -> list[str]:
    """Wait until a generation has trained, and return what its ranks see."""

    def look() -> list[str] | None:
        files = [folder / f"{generation}-{rank}" for rank in (0, 1)]
        return [each.read_text() for each in files] if all(each.exists() for each in files) else None

    return until(look, f"generation {generation} has trained", 60)


@pytest.mark.parametrize("uses", [(), ("uses",)], ids=["parked", "cold"])
def test_a_standby_takes_the_devices_of_the_member_that_it_replaces(
    start: Start, tmp_path: Path, uses: tuple[str, ...]
) -> None:
    run = start("--members 2 --standby 1", "visible_gpus.py", tmp_path, *uses, **DEALT)
    first = run.steady(20)
    assert seen(run, tmp_path, first["generation"]) == ["0", "GPU-7"]
    lost = run.broken(lambda: run.inject("member", 1))
    assert lost["remedy"] == "swap"
    now = run.trains(15)
    assert seen(run, tmp_path, now["generation"]) == ["0", "GPU-7"], "a rank uses another rank's GPU"
    assert run.stop().code == 130
    assert ("used a GPU before holdfast.join()" in run.output()) == bool(uses)

"""With only the first snapshot, the survivors' state saves the work."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.local.conftest import Start
from tests.local.running import Run
from tests.local.waiting import until

pytestmark = [pytest.mark.local, pytest.mark.timeout(150)]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("orders") / "linger"


@pytest.fixture(scope="module")
def run(start_shared: Start, file: Path) -> Iterator[Run]:
    run = start_shared("--members 3 --snapshot-every 0 --checkpoint-every 0", "stays_in_write.py", file)
    yield run
    assert run.stop().code == 130


@pytest.mark.parametrize(("kind", "signum"), [("crash", signal.SIGKILL), ("hang", signal.SIGSTOP)])
def test_a_crash_or_hang_of_one_rank_costs_at_most_one_step(run: Run, kind: str, signum: int) -> None:
    run.steady()
    run.trains(30)
    found = run.broken(lambda: run.hit(2, signum))
    assert (found["kind"], found["rank"]) == (kind, 2)
    assert found["lost_steps"] <= 1
    assert found["resume"]["source"] == "slot"


def kill_while_rank_1_writes(run: Run, file: Path, ranks: list[int]) -> None:
    """Kill `ranks` while rank 1 is inside the optimizer's writes; let it continue after the restart."""
    generation = run.trains(30)["generation"]
    file.touch()
    until(lambda: inside(file).exists() or None, "rank 1 is inside the optimizer", 10)
    run.kill_ranks(*ranks)
    run.after(generation)
    file.unlink()
    inside(file).unlink()


def inside(file: Path) -> Path:
    return file.with_name(f"{file.name}.inside")


def test_a_survivor_inside_its_writes_is_skipped_in_favor_of_another(run: Run, file: Path) -> None:
    run.steady()
    found = run.broken(lambda: kill_while_rank_1_writes(run, file, [0]))
    assert found["lost_steps"] <= 1, found


def test_the_torn_state_of_a_survivor_inside_its_writes_is_never_used(run: Run, file: Path) -> None:
    run.steady()
    last = run.incidents()[-1]["resume"]["step"]
    found = run.broken(lambda: kill_while_rank_1_writes(run, file, [0, 2]))
    assert found["resume"]["step"] == last, (
        "the run must resume from the last snapshot, not from a torn state"
    )


def test_without_a_survivor_the_last_snapshot_is_used(run: Run) -> None:
    run.steady()
    last = run.incidents()[-1]["resume"]["step"]
    run.trains(30)
    found = run.broken(lambda: run.kill_ranks(0, 1, 2))
    assert found["resume"]["step"] == last
    assert found["lost_steps"] >= 30

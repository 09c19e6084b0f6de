"""A stopped launcher: its ranks still train, but it could not replace them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.local.conftest import Start
from tests.local.running import Json, Run
from tests.local.waiting import GONE_S, until

pytestmark = [pytest.mark.local, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def run(start_shared: Start) -> Iterator[Run]:
    run = start_shared("--members 2 --standby 1 --checkpoint-every 0", "steady.py", 10_000_000)
    yield run
    assert run.stop().code == 130


def ready(run: Run) -> Json:
    """Wait until there is a standby that could take ranks immediately."""
    run.steady()
    return run.wait(lambda status: status["warm_ready"] and standbys(status), "a standby")


def standbys(status: Json) -> list[Json]:
    return [each for each in status["members"] if each["role"] == "standby" and each["parked"]]


def there(pids: dict[str, int]) -> dict[str, str]:
    """Return the processes that still exist, each with its line in /proc, which explains a failure."""
    found = {}
    for name, pid in pids.items():
        with suppress(FileNotFoundError, ProcessLookupError):
            found[name] = Path(f"/proc/{pid}/stat").read_text()
    return found


def test_a_member_whose_launcher_is_stopped_is_lost_and_costs_at_most_one_step(run: Run) -> None:
    before = ready(run)
    deaf = next(each for each in before["members"] if 0 in each["ranks"])
    pids = {"rank": run.pid(0), "launcher": deaf["launcher_pid"], "sidecar": deaf["sidecar_pid"]}
    found = run.broken(lambda: os.kill(deaf["launcher_pid"], signal.SIGSTOP))
    assert (found["kind"], found["member"], found["remedy"]) == ("member_lost", deaf["name"], "swap")
    assert "its launcher has sent no heartbeat for 5 s and is stopped" in found["why"]
    assert found["lost_steps"] <= 1, found
    after = run.trains()
    assert after["generation"] == before["generation"] + 1
    assert deaf["name"] not in {each["name"] for each in after["members"] if each["ranks"]}
    until(lambda: None if there(pids) else True, lambda: f"its processes are gone: {there(pids)}", GONE_S)


def test_a_standby_whose_launcher_is_stopped_is_replaced_while_training_continues(run: Run) -> None:
    before = ready(run)
    [deaf] = standbys(before)
    os.kill(deaf["launcher_pid"], signal.SIGSTOP)
    run.wait(
        lambda status: standbys(status) and deaf["name"] not in {each["name"] for each in status["members"]},
        "another standby",
    )
    after = run.trains()
    assert (after["generation"], after["incidents"]) == (before["generation"], before["incidents"])


def test_the_end_of_a_run_does_not_wait_for_a_stopped_launcher(start: Start) -> None:
    """The only member keeps training, and its sidecar's snapshots are saved without the launcher."""
    run = start("--grace 1", "steady.py", 10_000_000)
    before = run.steady()
    [member] = before["members"]
    os.kill(member["launcher_pid"], signal.SIGSTOP)
    run.wait(lambda _: "launcher silent" in run.logs("sidecar-*.log"), "the sidecar notices")
    after = run.trains()
    assert (after["generation"], after["incidents"]) == (before["generation"], 0)
    run.interrupt()
    ended = run.finish()
    assert ended.code == 130
    assert "with a checkpoint of step" in ended.lines[-1]

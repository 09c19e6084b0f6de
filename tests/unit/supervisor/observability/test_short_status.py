"""A status of any size is shortened to fit into a Supervision, and the rest can be shown."""

from __future__ import annotations

import base64
import json
import random
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor.cli import status as shown
from supervisor.decision.durable_facts import with_last_status
from supervisor.observability import short_status
from supervisor.observability.short_status import MAX_BYTES
from tests.unit.supervisor.job_views import memory


def of_job(members: int, nproc: int) -> dict[str, Any]:
    """Return a status with values that compress as badly as measured times do."""
    some = random.Random(members)
    names = [f"llama-worker-{number}.{some.getrandbits(32):08x}" for number in range(members)]
    ranks = [
        {
            "rank": number,
            "member": names[number // nproc],
            "pid": some.randrange(1 << 22),
            "state": "running",
            "step": 4_000,
            "phase": "forward",
            "label": "",
            "loss": some.random(),
            "step_s": some.random(),
            "p99_s": some.random(),
            "own_s": some.random(),
            "own_data_s": some.random(),
            "note": "",
            "slow": 1.5 if number == 7 else None,
            "slow_since": 3_000 if number == 7 else None,
            "peers_s": 0.5 if number == 7 else None,
        }
        for number in range(members * nproc)
    ]
    listed = [
        {
            "name": name,
            "node": f"gpu-{some.getrandbits(32):08x}",
            "role": "active",
            "connected": True,
            "parked": nproc,
            "launcher_error": "",
            "warm_error": "",
            "ranks": [*range(number * nproc, (number + 1) * nproc)],
            "launcher_pid": some.randrange(1 << 22),
            "sidecar_pid": some.randrange(1 << 22),
        }
        for number, name in enumerate(names)
    ]
    lag = {name: {"max_s": some.random(), "p99_s": some.random()} for name in ("supervisor", *names)}
    made = {"phase": "running", "generation": 1, "step": 4_000, "world_size": members * nproc}
    return {**made, "members": listed, "ranks": ranks, "lag": lag, "message": "all is well"}


def fitted(status: dict[str, Any]) -> dict[str, Any]:
    text = short_status.encode(status)
    assert 0 < len(text) <= MAX_BYTES
    found = short_status.decode(text)
    assert found is not None
    return found


@pytest.mark.parametrize(("members", "nproc"), [(2, 1), (16, 8), (64, 8)])
def test_a_status_is_kept_whole_if_it_fits(members: int, nproc: int) -> None:
    assert fitted(of_job(members, nproc)) == of_job(members, nproc)


def test_a_small_status_can_be_read_without_a_program() -> None:
    assert json.loads(short_status.encode(of_job(2, 1))) == of_job(2, 1)


def test_a_large_job_keeps_its_members_and_what_is_shown_of_its_ranks() -> None:
    whole = of_job(250, 8)
    found = fitted(whole)
    assert found["step"] == 4_000
    assert [each["name"] for each in found["members"]] == [each["name"] for each in whole["members"]]
    assert [each["step"] for each in found["ranks"]] == [4_000] * 2_000
    assert "pid" not in found["ranks"][0]
    lines = shown.lines(found, alive=True, live=True, now_s=0.0, path=None, name="team/llama")
    assert sum("llama-worker-" in line and "running" in line for line in lines) == 2_000
    assert any(line.lstrip().startswith("slow") and "rank 7" in line for line in lines)


def test_the_next_supervisor_reads_the_steps_of_all_ranks_from_a_shortened_status() -> None:
    held = memory(phase="running", generation=1, settled=True, world_size=2_000, nproc=8)
    status = {**of_job(250, 8), "snapshot_step": 3_999}
    assert with_last_status(held, fitted(status)) == with_last_status(held, status)
    assert with_last_status(held, fitted(status)).held == 3_999


def test_a_job_that_is_too_large_for_its_ranks_keeps_its_members() -> None:
    found = fitted(of_job(1_200, 8))
    assert (len(found["members"]), found["ranks"], found["step"]) == (1_200, [], 4_000)
    assert shown.lines(found, alive=True, live=True, now_s=0.0, path=None, name="team/llama")


def test_a_status_that_does_not_fit_at_all_is_replaced_by_nothing() -> None:
    noise = base64.b64encode(random.Random(1).randbytes(2 * MAX_BYTES)).decode()
    assert short_status.encode({"step": 3, "message": noise}) == ""
    assert short_status.decode("") is None


@given(st.none() | st.integers() | st.text() | st.text().map(lambda text: "zlib:" + text))
def test_a_text_that_anybody_has_written_is_read_or_ignored(text: object) -> None:
    assert short_status.decode(text) is None or isinstance(text, str)


def test_a_text_that_unpacks_to_too_much_is_ignored() -> None:
    bomb = base64.b64encode(zlib.compress(b" " * (5 << 20) + b"{}")).decode()
    assert short_status.decode("zlib:" + bomb) is None
    assert short_status.decode("[" * 100_000) is None


@given(
    st.dictionaries(st.sampled_from(["members", "ranks", "lag"]), st.lists(st.none() | st.text()) | st.none())
)
def test_a_status_of_another_form_is_shortened_without_an_error(parts: dict[str, Any]) -> None:
    noise = {"message": base64.b64encode(random.Random(1).randbytes(2 * MAX_BYTES)).decode()}
    assert short_status.encode({**parts, **noise}) == ""

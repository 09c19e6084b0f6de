from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.launch import _parse
from sidecar import config
from supervisor import plan
from supervisor.plan import Plan

BASE = {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}


@pytest.fixture
def made(tmp_path: Path) -> Plan:
    settings = {
        "HOLDFAST_CHECKPOINTS": str(tmp_path / "run" / "checkpoints"),
        "HOLDFAST_SUPERVISOR": "http://127.0.0.1:9",
        "HOLDFAST_TOKEN_FILE": str(tmp_path / "run" / "token"),
    }
    command = ("python", "train.py", "--", "x")
    return Plan(command, 2, 4, "park", tmp_path / "memory", tmp_path / "run", settings, ("run",))


def test_a_launcher_is_told_all_that_it_asks_for_and_has_devices_of_its_own(made: Plan) -> None:
    start = plan.launcher(made, "m1", 1, 77, BASE)
    given = _parse(list(start.argv[4:]))
    assert given.command == list(made.command)
    assert (given.name, given.nproc, given.warm, given.parent) == ("m1", 2, "park", 77)
    assert Path(given.directory) == made.directory("m1")
    assert Path(given.logs) == made.logs
    assert start.environment["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert [each.name for each in Path(start.argv[3]).iterdir()] == ["holdfast"]


def test_a_sidecar_is_told_all_that_it_asks_for(made: Plan) -> None:
    start = plan.sidecar(made, "m1", 77, BASE)
    found = config.from_environment(start.environment)
    assert (found.member, found.nproc, found.directory) == ("m1", 2, made.directory("m1"))
    assert found.supervisor_url == "http://127.0.0.1:9"
    assert start.environment["HOLDFAST_PARENT"] == "77"


def test_a_supervisor_inherits_its_line_and_its_socket(made: Plan) -> None:
    start = plan.supervisor(made, 77, 5, 6, BASE)
    assert start.argv[-2:] == ("serve", "run")
    assert start.descriptors == (5, 6)
    assert (start.environment["HOLDFAST_KEEPER_FD"], start.environment["HOLDFAST_API_FD"]) == ("5", "6")

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdfast.launcher.cli import parse_options
from holdfast.protocol import environment
from sidecar import config
from supervisor.local.keeper import process_specs
from supervisor.local.keeper.process_specs import RunSpec

BASE = {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}


@pytest.fixture
def made(tmp_path: Path) -> RunSpec:
    settings = {
        "HOLDFAST_CHECKPOINTS": str(tmp_path / "run" / "checkpoints"),
        "HOLDFAST_SUPERVISOR": "http://127.0.0.1:9",
        "HOLDFAST_TOKEN_FILE": str(tmp_path / "run" / "token"),
    }
    command = ("python", "train.py", "--", "x")
    return RunSpec(command, 2, 4, "park", tmp_path / "memory", tmp_path / "run", settings, ("run",))


def test_a_launcher_receives_all_its_arguments_and_the_existing_devices(made: RunSpec) -> None:
    start = process_specs.launcher(made, "m1", 77, BASE)
    given = parse_options(list(start.argv[4:]))
    assert given.command == list(made.command)
    assert (given.name, given.nproc, given.warm, given.parent) == ("m1", 2, "park", 77)
    assert Path(given.directory) == made.directory("m1")
    assert Path(given.logs) == made.logs
    assert start.environment["HOLDFAST_DEVICES"] == "0,1,2,3"
    assert start.environment["CUDA_VISIBLE_DEVICES"] == BASE["CUDA_VISIBLE_DEVICES"]
    assert [each.name for each in Path(start.argv[3]).iterdir()] == ["holdfast"]


def test_a_sidecar_receives_all_its_arguments(made: RunSpec) -> None:
    start = process_specs.sidecar(made, "m1", 77).alone(BASE)
    found = config.from_environment(start.environment)
    assert (found.member, found.nproc, found.directory) == ("m1", 2, made.directory("m1"))
    assert found.supervisor_url == "http://127.0.0.1:9"
    assert start.environment["HOLDFAST_PARENT"] == "77"


def test_a_supervisor_inherits_its_connection_and_its_socket(made: RunSpec) -> None:
    part = process_specs.supervisor(made, 77, 5, 6)
    start = part.alone(BASE)
    assert start.argv[-3:] == ("supervisor", "serve", "run")
    assert start.descriptors == (5, 6)
    assert (start.environment["HOLDFAST_KEEPER_FD"], start.environment["HOLDFAST_API_FD"]) == ("5", "6")
    assert start.environment["PATH"] == BASE["PATH"]
    order = part.order()
    assert (order.argv, order.inherits) == (
        ("supervisor", "serve", "run"),
        ("HOLDFAST_KEEPER_FD", "HOLDFAST_API_FD"),
    )
    assert order.settings == {"HOLDFAST_PARENT": "77"}


def test_a_template_imports_the_scripts_modules_and_finds_our_package_behind_its_own(made: RunSpec) -> None:
    script = made.runtime.with_name("train.py")
    script.write_text("import json\n")
    plain = replace(made, gpus=None, command=("python", str(script)))
    start = process_specs.member_fork_server(plain, 77, 5, {**BASE, "PYTHONPATH": "/theirs"})
    assert start is not None
    first, root = start.argv[-2:]
    assert (first, start.environment["PYTHONPATH"]) == (str(script.parent), f"/theirs:{root}")
    given = json.loads(start.environment[environment.WARM])
    assert (given["parent"], given["control"], start.descriptors) == (77, 5, (5,))
    assert given["program"]["imports"] == ["json"]


@pytest.mark.parametrize(
    "other",
    [{"gpus": 4}, {"warm": "spawn"}, {"warm": "cold"}, {"command": ("true",)}],
    ids=["devices of their own", "no forks", "nothing warm", "no Python"],
)
def test_there_is_no_template_if_members_cannot_share_imports(made: RunSpec, other: dict[str, Any]) -> None:
    script = made.runtime.with_name("train.py")
    script.write_text("")
    shared = replace(made, gpus=None, command=("python", str(script)))
    assert process_specs.member_fork_server(shared, 77, 5, BASE) is not None
    assert process_specs.member_fork_server(replace(shared, **other), 77, 5, BASE) is None

"""Each variable is written once, and a rank gets torchrun's."""

from __future__ import annotations

import re

import pytest

from holdfast.protocol import environment
from holdfast.protocol.environment import rank_environment
from holdfast.protocol.launcher_messages import Launch, RankStart
from tests.unit.literals import ROOT, string_literals

PROGRAMS = ("holdfast", "supervisor", "sidecar", "nodeagent")


@pytest.mark.parametrize(("rank", "local", "group"), [(0, 0, 0), (1, 1, 0), (2, 0, 1), (3, 1, 1)])
def test_each_rank_gets_the_variables_that_torchrun_would_set(rank: int, local: int, group: int) -> None:
    launch = Launch(5, 4, 2, "10.0.0.1", 29500, 0, 0.0)
    assert rank_environment(launch, RankStart(rank, local)) == {
        "RANK": str(rank),
        "LOCAL_RANK": str(local),
        "GROUP_RANK": str(group),
        "ROLE_RANK": str(rank),
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_WORLD_SIZE": "4",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
        "ROLE_NAME": "default",
        "TORCHELASTIC_RUN_ID": "holdfast",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_RESTART_COUNT": "4",
        "HOLDFAST_GENERATION": "5",
    }


def test_no_program_spells_a_variable_that_the_table_has() -> None:
    spelled = string_literals(*PROGRAMS, but="holdfast/protocol/environment.py")
    assert [each for each in spelled if re.search(r"HOLDFAST_[A-Z0-9]", each.text)] == []


def test_each_variable_of_the_table_is_used() -> None:
    constants = {
        value: name
        for name, value in vars(environment).items()
        if isinstance(value, str) and value in environment.VARIABLES
    }
    assert constants.keys() == environment.VARIABLES.keys()
    sources = "".join(path.read_text() for each in PROGRAMS for path in (ROOT / each).rglob("*.py"))
    used = set(re.findall(r"\benvironment\.([A-Z_]+)\b", sources))
    assert used == set(constants.values())

"""`holdfast run` and the webhook know the same launchers."""

from __future__ import annotations

import pytest

from holdfast import launch_commands
from holdfast.worker import program
from supervisor.admission.training_command import TrainingCommand, understand

STARTS = [
    *([each] for each in launch_commands.LAUNCHER_PROGRAMS),
    *(["python3", "-m", each] for each in launch_commands.LAUNCHER_MODULES),
    [launch_commands.ACCELERATE_PROGRAM, "launch"],
    ["python3", "-m", launch_commands.ACCELERATE_MODULE, "launch"],
]
OPTIONS = {
    launch_commands.OLD_MODULE: ["--use-env"]
}  # without this option, the launcher passes --local-rank to the script


@pytest.mark.parametrize("words", STARTS, ids=" ".join)
def test_each_launcher_is_refused_by_run_and_replaced_in_a_pod(words: list[str]) -> None:
    command = [*words, *OPTIONS.get(words[-1], []), "train.py"]
    assert program.launcher_refusal(command)
    found = understand(command, [], {}, None)
    assert isinstance(found, TrainingCommand)
    assert found.script == ("train.py",)
    assert found.launcher


@pytest.mark.parametrize("name", [launch_commands.ACCELERATE_PROGRAM, launch_commands.ACCELERATE_MODULE])
def test_accelerate_without_launch_starts_no_ranks(name: str) -> None:
    assert program.launcher_refusal([name, "env"]) == ""

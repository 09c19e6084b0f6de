from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from holdfast.errors import BadInput
from holdfast.protocol import environment
from supervisor.cli import command_options, parser
from supervisor.cli.option_table import COMMANDS
from supervisor.options.run_options import Option

OPTIONS = [(name, option) for name, spec in COMMANDS.items() for option in spec.options]
VALUED = [(name, option) for name, option in OPTIONS if option.value is not None]
RUN = [(name, option) for name, option in OPTIONS if name == "run"]
NUMBERS = ("whole number", "number", "duration", "share")
IN_WORDS = {
    "--run-dir",
    "--hang-floor",
    "--loss-jump",
    "--job",
    "--context",
    "-n",
    "--gpu-hour-cost",
    "--replacement",
    "--state",
    "--checkpoint-bandwidth",
    "--why",
}  # defaults that are not values of the option
NOT_A_BEGINNING = {"a", "an", "the", "how", "what", "whether", "if", "for", "when", "which", "to"}
DATA = {
    "run": command_options.RunOptions,
    "status": command_options.Status,
    "incidents": command_options.Incidents,
    "explain": command_options.Explain,
    "checkpoints": command_options.Checkpoints,
    "stop": command_options.Stop,
    "inject": command_options.Inject,
    "jobs": command_options.Jobs,
    "doctor": command_options.Doctor,
    "nodes": command_options.Nodes,
    "inject-manifest": command_options.InjectManifest,
    "plan": command_options.PlanOptions,
    "demo": command_options.Demo,
}
GUIDE = (Path(__file__).parents[4] / "docs" / "user-guide.md").read_text()


@pytest.mark.parametrize(("name", "option"), OPTIONS)
def test_every_option_has_a_help_text_with_its_meaning_and_unit(name: str, option: Option) -> None:
    first = option.help.split()[0]
    assert first not in NOT_A_BEGINNING
    assert first == first.lower()
    assert not option.help.endswith(".")
    assert option.unit in option.help
    if option.value is not None and option.value.kind in NUMBERS:
        assert option.unit or option.metavar == "TIME"
        assert option.value.bounds is not None
        assert option.value.accepts


@pytest.mark.parametrize(("name", "option"), OPTIONS)
def test_the_help_of_a_command_shows_each_option_with_its_values_and_default(
    name: str, option: Option
) -> None:
    text = " ".join(parser.of(name).split())
    assert option.names[0] in text
    assert option.help in text
    if option.value is not None:
        assert ("required)" if option.required else f"default: {option.default})") in text
        assert option.value.accepts in text


@pytest.mark.parametrize(("name", "option"), OPTIONS)
def test_a_default_in_the_table_is_the_one_that_applies(name: str, option: Option) -> None:
    field = {each.name: each for each in dataclasses.fields(DATA[name])}[option.field]
    if option.required:
        assert field.default is dataclasses.MISSING
    elif option.value is None:
        assert (option.default, field.default) == ("off", False)
    elif option.names[0] not in IN_WORDS:
        assert option.value.read(option.default) == field.default


@pytest.mark.parametrize(("name", "option"), RUN)
def test_the_user_guide_has_the_same_names_values_and_default(name: str, option: Option) -> None:
    names = ", ".join(f"`{each} {option.metavar}".rstrip() + "`" for each in option.names)
    values = "flag" if option.value is None else option.value.accepts or option.value.kind
    default = f"`{option.default}`" if "/" in option.default else option.default
    row = f"| {names} | {values} | {default} | "
    assert sum(line.startswith(row) for line in GUIDE.splitlines()) == 1, row


@pytest.mark.parametrize(("name", "option"), VALUED)
def test_a_bad_value_is_answered_with_option_value_and_expectation(name: str, option: Option) -> None:
    assert option.value is not None
    bad = "\0" if option.value.kind in ("path", "name") else "nonsense"
    with pytest.raises(BadInput) as error:
        parser.parse([name, f"{option.names[0]}={bad}", "x"], environment={}, directory=Path("nowhere"))
    assert (
        str(error.value) == f"invalid value {bad!r} for {option.names[0]}: expected {option.value.expected}"
    )


def test_the_options_in_the_table_of_environment_variables_exist() -> None:
    launch = {"--name", "--nproc", "--directory", "--logs", "--warm"}  # an option of `holdfast launch`
    known = launch | {name for spec in COMMANDS.values() for each in spec.options for name in each.names}
    named = {
        option
        for variable in environment.VARIABLES.values()
        for text in (variable.set_by, variable.read_by, variable.meaning)
        for option in re.findall(r"--[a-z-]+", text)
    }
    assert {"--hang-floor", "--first-step-timeout", "--pause-timeout"} <= named
    assert named <= known

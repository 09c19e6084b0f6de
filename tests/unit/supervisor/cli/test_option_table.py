from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from holdfast.errors import BadInput
from holdfast.protocol import environment
from supervisor.cli import commands, option_table, parser
from supervisor.cli.option_table import COMMANDS, Option, ValueType

CHECKPOINT = option_table.duration(1, 3600, "none")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30s", 30), ("5m", 300), ("1.5m", 90), ("1h", 3600), ("250ms", None), ("45", 45), ("0", 0),
     ("0s", 0), ("2 min", 120), (".5m", 30), ("61m", None), ("-5s", None), ("5x", None),
     ("", None), ("nan", None), ("1e3", None), ("\u0663s", None)],
)  # fmt: skip
def test_durations_have_units_and_bounds(text: str, seconds: float | None) -> None:
    if seconds is not None:
        assert CHECKPOINT.read(text) == seconds
        return
    with pytest.raises(ValueError, match=r"^a time of 1s-1h, such as 30s or 5m, or 0 for none$"):
        CHECKPOINT.read(text)


@pytest.mark.parametrize(
    ("value_type", "text", "value"),
    [
        (option_table.whole_number(0, 5), "5", 5),
        (option_table.whole_number(0, 5, {"auto": -1}), "auto", -1),
        (option_table.number(1.5, 10, "off"), "0", 0.0),
        (option_table.number(1.5, 10), "2.5", 2.5),
        (option_table.share, "1%", 0.01),
        (option_table.share, "0.5", 0.5),
        (option_table.ranks, "gpu", "gpu"),
        (option_table.ranks, "8", 8),
        (option_table.nodes, "2:2", 2),
    ],
)
def test_a_value_within_its_bounds_is_read(value_type: ValueType, text: str, value: object) -> None:
    assert value_type.read(text) == value


@pytest.mark.parametrize(
    ("value_type", "text", "accepted"),
    [
        (option_table.whole_number(0, 5), "6", "0-5"),
        (option_table.whole_number(0, 5), "1.0", "a whole number 0-5"),
        (option_table.whole_number(0, 5, {"auto": -1}), "a", "0-5 or auto"),
        (option_table.whole_number(0, 5), "\u0663", "0-5"),
        (option_table.whole_number(0, 5), "9" * 5000, "0-5"),
        (option_table.number(1.5, 10, "off"), "1", "or 0 for off"),
        (option_table.number(1.5, 10), "nan", "1.5-10"),
        (option_table.number(1.5, 10), "inf", "1.5-10"),
        (option_table.share, "0", "above 0"),
        (option_table.share, "200%", "up to 1"),
        (option_table.ranks, "all", "auto, cpu or gpu"),
        (option_table.nodes, "2:4", "2 or 4 "),
        (option_table.nodes, "2:", "1-4096"),
        (option_table.choice("a", "b"), "c", "a or b"),
        (option_table.directory, "", "directory"),
        (option_table.directory, "--json", "directory"),
        (option_table.directory, "a\0b", "directory"),
    ],
)
def test_any_other_value_says_what_is_accepted(value_type: ValueType, text: str, accepted: str) -> None:
    with pytest.raises(ValueError, match=accepted):
        value_type.read(text)


OPTIONS = [(name, option) for name, spec in COMMANDS.items() for option in spec.options]
VALUED = [(name, option) for name, option in OPTIONS if option.value is not None]
RUN = [(name, option) for name, option in OPTIONS if name == "run"]
NUMBERS = ("whole number", "number", "duration", "share")
IN_WORDS = {"--run-dir", "--hang-floor", "--loss-jump"}  # defaults that no value of the option says
NOT_A_BEGINNING = {"a", "an", "the", "how", "what", "whether", "if", "for", "when", "which", "to"}
DATA = {
    "run": commands.RunOptions,
    "status": commands.Status,
    "incidents": commands.Incidents,
    "explain": commands.Explain,
    "checkpoints": commands.Checkpoints,
    "stop": commands.Stop,
    "inject": commands.Inject,
    "demo": commands.Demo,
}
GUIDE = (Path(__file__).parents[4] / "docs" / "user-guide.md").read_text()


@pytest.mark.parametrize(("name", "option"), OPTIONS)
def test_an_option_has_a_help_text_that_says_what_it_is_and_its_unit(name: str, option: Option) -> None:
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
def test_the_help_of_a_command_shows_each_option_with_what_it_accepts_and_its_default(
    name: str, option: Option
) -> None:
    text = " ".join(parser.of(name).split())
    assert option.names[0] in text
    assert option.help in text
    if option.value is not None:
        assert f"default: {option.default})" in text
        assert option.value.accepts in text


@pytest.mark.parametrize(("name", "option"), OPTIONS)
def test_a_default_in_the_table_is_the_one_that_applies(name: str, option: Option) -> None:
    field = {each.name: each for each in dataclasses.fields(DATA[name])}[option.field]
    if option.value is None:
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
    bad = "\0" if option.value is option_table.directory else "nonsense"
    with pytest.raises(BadInput) as error:
        parser.parse([name, f"{option.names[0]}={bad}", "x"], environment={}, directory=Path("nowhere"))
    assert option.value is not None
    assert (
        str(error.value) == f"invalid value {bad!r} for {option.names[0]}: expected {option.value.expected}"
    )


def test_the_options_that_the_table_of_environment_variables_names_exist() -> None:
    launch = {"--name", "--nproc", "--directory", "--logs", "--warm"}  # of `holdfast launch`
    known = launch | {name for spec in COMMANDS.values() for each in spec.options for name in each.names}
    named = {
        option
        for variable in environment.VARIABLES.values()
        for text in (variable.set_by, variable.read_by, variable.meaning)
        for option in re.findall(r"--[a-z-]+", text)
    }
    assert {"--hang-floor", "--first-step-timeout", "--pause-timeout"} <= named
    assert named <= known

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest

from supervisor.admission.shell_text import simple_commands
from supervisor.admission.shell_variables import value_at
from tests.samples.growth import growth

ENVIRONMENT: dict[str, str | None] = {"N": "8", "SECRET": None, "OTHER": "$(N)"}


def value(text: str, reference: str = "$N") -> str | None:
    """Return the known value of `reference` in the last command of `text`."""
    commands = simple_commands(f"{text} show")
    return value_at(reference, commands[-1], commands, ENVIRONMENT)


KNOWN = [
    ("", "8"),
    ("N=4;", "4"),
    ("N=4 &&", "4"),
    ("export N=4\n", "4"),
    ("declare -x N='4'; M=1 N=5\n", "5"),
    ("set -e; cd / &&", "8"),
    ("export M=$N; echo $N ${N} NN;", "8"),
    ("N=4", "8"),  # the words of a command are expanded before its own assignments
]


@pytest.mark.parametrize(("text", "expected"), KNOWN)
def test_the_value_is_that_of_the_last_assignment_or_of_the_container(text: str, expected: str) -> None:
    assert (value(text), value(text, "${N}")) == (expected, expected)
    line = f'{text} printf %s "$N"'
    done = subprocess.run(["bash", "-c", line], env={"N": "8"}, check=True, capture_output=True, text=True)
    assert done.stdout.endswith(expected)


@pytest.mark.parametrize(
    "text",
    [
        "N=$M;",
        "N=$(nproc);",
        "N=4 a;",
        "echo N;",
        "N=4 ||",
        "N=4 &",
        "true && N=4;",
        "if a; then N=4; fi;",
        "(N=4);",
        "for N in 1 2; do a; done;",
        "source env.sh;",
        ". env.sh;",
        'eval "$X";',
        "read N;",
        "unset N;",
        "printf -v N 4;",
        "echo ${N:=4};",
        "echo $((N++));",
        "((N=4));",
        "N+=4;",
        "let N=4;",
    ],
)
def test_a_variable_that_something_else_may_have_set_is_not_known(text: str) -> None:
    assert value(text) is None


@pytest.mark.parametrize(
    "reference", ["$SECRET", "$OTHER", "$MISSING", "$1", "$N$N", "${N:-2}", "x$N", "N", "$(N)"]
)
def test_only_a_reference_to_a_known_variable_has_a_value(reference: str) -> None:
    assert value("", reference) is None


def test_the_time_for_many_commands_does_not_depend_on_the_length_of_the_name() -> None:
    def reading(name: str) -> Callable[[], object]:
        commands = simple_commands("a;" * 20_000 + f"show ${name}")
        return lambda: value_at(f"${name}", commands[-1], commands, {})

    assert growth(reading("N"), reading("N" * 80_000)) < 3

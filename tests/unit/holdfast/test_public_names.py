"""A script sees the names of `holdfast` that the user guide lists, and no internal ones."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import holdfast

GUIDE = Path(__file__).parents[3] / "docs" / "user-guide.md"
ATTRIBUTES = {
    "Session": {
        *("device", "generation", "local_rank", "on_resize", "protect", "rank", "resized", "world_size"),
    },
    "State": {"commit", "pause", "step", "steps"},
    "Batches": {"ends_epoch", "epoch", "first_step", "indices", "position", "steps"},
}
CLASSES = [name for name in holdfast.__all__ if inspect.isclass(getattr(holdfast, name))]
FUNCTIONS = [name for name in holdfast.__all__ if inspect.isfunction(getattr(holdfast, name))]


def own_attributes(cls: type) -> dict[str, object]:
    """Return the attributes without an underscore that `cls` and its bases in holdfast define."""
    bases = [base for base in cls.__mro__ if base.__module__.startswith("holdfast.")]
    return {name: value for base in bases for name, value in vars(base).items() if not name.startswith("_")}


def names_in_guide() -> set[str]:
    """Return the names in the first column of the table of the section "All names"."""
    section = GUIDE.read_text().split("### All names", 1)[1].split("\n## ", 1)[0]
    first_cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return {name for cell in first_cells for name in re.findall(r"`(\w+)", cell)}


def test_completion_lists_the_public_names_and_no_more() -> None:
    assert dir(holdfast) == sorted(holdfast.__all__)


def test_the_user_guide_lists_the_public_names_and_no_more() -> None:
    assert names_in_guide() == set(holdfast.__all__)


def test_an_error_that_a_script_can_see_has_a_public_name() -> None:
    import holdfast.errors

    raised = {name for name, value in vars(holdfast.errors).items() if inspect.isclass(value)}
    assert raised <= set(holdfast.__all__)


@pytest.mark.parametrize("name", CLASSES)
def test_a_public_class_shows_what_is_documented_and_no_internals(name: str) -> None:
    assert set(own_attributes(getattr(holdfast, name))) == ATTRIBUTES.get(name, set())


@pytest.mark.parametrize("name", [*CLASSES, *FUNCTIONS])
def test_a_public_class_or_function_has_a_docstring_and_so_has_each_attribute(name: str) -> None:
    public = getattr(holdfast, name)
    assert vars(public).get("__doc__", public.__doc__)
    if inspect.isclass(public):
        undocumented = [each for each, value in own_attributes(public).items() if not inspect.getdoc(value)]
        assert not undocumented

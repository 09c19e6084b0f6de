"""The page on sizing shows what `holdfast plan` prints, and names each source of a default."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from supervisor import __main__ as program
from supervisor.options.plan_options import PLAN
from supervisor.options.run_options import Option
from supervisor.planning.model import SizingInputs, SizingPlan
from supervisor.planning.planner import plan
from supervisor.wording import part, percent, seconds

DOCS = Path(__file__).parents[2] / "docs"
PAGE, GUIDE = (DOCS / "sizing.md").read_text(), (DOCS / "user-guide.md").read_text()
SHOWN = re.findall(
    r"^```sh\nholdfast (plan [^\n]+)\n```\n\n```text\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL
)
SIZES = (64, 512, 2_048)
FREE_NODES_S = 600.0


@pytest.mark.parametrize(("line", "output"), SHOWN, ids=[line for line, _ in SHOWN])
def test_each_output_in_the_page_is_what_the_command_prints(
    line: str, output: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program.main(shlex.split(line)) == 0
    assert capsys.readouterr().out == output


def test_the_page_shows_a_plan_and_a_simulated_one() -> None:
    assert [line.count("--simulate") for line, _ in SHOWN] == [0, 1]


def _row(nodes: int, refill: str, found: SizingPlan) -> str:
    best, none = found.outlooks[found.recommended], found.outlooks[0]
    cells = [f"{nodes:,}", refill, seconds(1.0 / found.inputs.fault_rate), percent(none.ettr)]
    cells += [f"**{best.standbys}**", percent(best.ettr), part(best.standbys / nodes), str(found.for_99)]
    cells += [seconds(found.checkpoint.interval_s), seconds(found.checkpoint.without_copies_s)]
    return f"| {' | '.join(cells)} |"


def test_the_table_of_sizes_is_computed_by_the_command() -> None:
    section = PAGE.partition("\n## Three sizes\n")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if re.match(r"\| \d", line)]
    jobs = [SizingInputs(nodes) for nodes in SIZES]
    expected = [_row(job.nodes, "2 d, repair", plan(job)) for job in jobs]
    expected += [
        _row(job.nodes, "10 min, free nodes", plan(replace(job, replacement_s=FREE_NODES_S))) for job in jobs
    ]
    assert rows == expected


def test_the_page_has_each_option_with_a_default_and_where_it_comes_from() -> None:
    section = PAGE.partition("\n## Where the defaults come from\n")[2].partition("\n## ")[0]
    listed = dict(re.findall(r"^\| `(--[a-z-]+)` \| ([^|]+) \| [^|]+ \|$", section, re.MULTILINE))
    inputs = {each.name for each in SizingInputs.__dataclass_fields__.values()}
    expected = {
        option.names[0]: option.default for option in PLAN if option.field in inputs and not option.required
    }
    assert listed == expected


@pytest.mark.parametrize("option", PLAN, ids=lambda option: option.names[0])
def test_the_user_guide_has_the_same_values_default_and_meaning(option: Option) -> None:
    section = GUIDE.partition("\n### Planning\n")[2].partition("\n### ")[0]
    value = "flag" if option.value is None else option.value.accepts
    default = "required" if option.required else option.default
    name = f"{option.names[0]} {option.metavar}".rstrip()
    assert f"\n| `{name}` | {value} | {default} | {option.help} |\n" in section

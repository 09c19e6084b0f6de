"""The documentation agrees with the code: commands, options, fields, metrics, links."""

from __future__ import annotations

import functools
import os
import re
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast import __version__
from holdfast.protocol import environment
from holdfast.protocol.drills import DRILLS
from supervisor.admission.pod_layout import MAX_JOB_RANKS
from supervisor.admission.settings import ANNOTATIONS
from supervisor.cli import checkpoints, parser
from supervisor.cli.command_options import RunOptions
from supervisor.cli.option_table import COMMANDS
from supervisor.cluster.adoption.pod_facts import MAX_MEMBERS
from supervisor.cluster.adoption.workload_kinds import shipped
from supervisor.cluster.pods import MEMBER_TIMEOUT_S
from supervisor.decision.transition import TRANSITIONS, mermaid
from supervisor.fault_kinds import FAULT_KINDS
from supervisor.observability import incident_record
from supervisor.observability import status as records
from supervisor.observability.bookkeeping import Bookkeeping
from supervisor.observability.ledger import Bucket
from supervisor.observability.metrics import METRICS
from supervisor.options.value_types import span
from supervisor.view.model import PHASES, Dismiss, JobState, Look, OpenIncident, View

ROOT = Path(__file__).parents[2]
DOCUMENTS = (ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md")))
GUIDE = (ROOT / "docs" / "user-guide.md").read_text()
ELSEWHERE = ("launch", "node")  # these two have their own parsers
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"`(holdfast [a-z][^`\n]*)`")
_LINK = re.compile(r"\]\(([^)\s]+)\)")


def commands() -> Iterator[tuple[str, str]]:
    """Yield every holdfast command line in a shell block, and every complete one in inline code."""
    for path in DOCUMENTS:
        text = path.read_text()
        for language, block in _FENCE.findall(text):
            if language == "sh":
                lines = [line.strip() for line in block.replace("\\\n", " ").splitlines()]
                yield from ((path.name, line) for line in lines if line.startswith("holdfast "))
        for line in _SPAN.findall(_FENCE.sub("", text)):
            if line not in ("holdfast run", "holdfast plan") and "=" not in line:
                yield path.name, line


def words_of(line: str) -> list[str]:
    """Return the words of a command line up to a pipe, without the program's name."""
    return shlex.split(line.partition(" | ")[0], comments=True)[1:]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory with the scripts that the examples name, and a `python` on the path."""
    folder = tmp_path_factory.mktemp("project")
    for name in ("pkg", "examples"):
        (folder / name).mkdir()
    for name in ("train.py", "pkg/__init__.py", "pkg/train.py", "examples/minimal.py", "examples/epochs.py"):
        (folder / name).touch()
    binaries = folder / "bin"
    binaries.mkdir()
    (binaries / "python").symlink_to(sys.executable)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{binaries}{os.pathsep}{os.environ['PATH']}")
        yield folder


@pytest.mark.parametrize(("document", "line"), sorted(set(commands())))
def test_each_command_in_the_docs_is_accepted(document: str, line: str, project: Path) -> None:
    words = words_of(line)
    if words[0] in ELSEWHERE:
        return
    asked = parser.parse(words, environment={}, directory=project)
    assert not isinstance(asked, RunOptions) or not asked.notes, (
        "an example uses an option that has no effect"
    )


def test_each_make_target_in_the_docs_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for path in DOCUMENTS:
        text = path.read_text()
        shown = set(re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE))
        assert shown <= targets, f"{path.name}: {shown - targets}"


def test_the_docs_show_every_command() -> None:
    found = [line for _, line in commands()]
    assert {words_of(line)[0] for line in found} >= {*COMMANDS, *ELSEWHERE}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_each_link_leads_to_an_existing_file_and_heading(path: Path) -> None:
    for target in _LINK.findall(_FENCE.sub("", path.read_text())):
        if target.startswith(("http://", "https://")):
            continue
        name, _, fragment = target.partition("#")
        linked = (path.parent / name).resolve() if name else path
        assert linked.exists(), f"{target} is not there"
        assert linked.is_relative_to(ROOT), f"{target} is outside of the repository"
        if fragment:
            assert fragment in anchors(linked), f"{target}: {linked.name} has no such heading"


@functools.cache
def anchors(path: Path) -> set[str]:
    """Return the anchors of the headings as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", _FENCE.sub("", path.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_guide_has_every_option(name: str) -> None:
    for option in COMMANDS[name].options:
        for spelled in option.names:
            assert re.search(rf"`{spelled}[ `]", GUIDE), f"{name} {spelled} is not in the user guide"


def test_the_guide_has_every_drill() -> None:
    for drill in DRILLS:
        assert f"| `{drill}` |" in GUIDE


def test_the_guide_has_every_field_of_the_status() -> None:
    view = View(time.monotonic_ns(), time.time(), JobState(2, 1))
    status = records.build(view, Bookkeeping(view.now_ns, None), records.StatusContext("run", 0.0, 1))
    for field in status:
        assert f"`{field}`" in GUIDE, f"{field} of status.json"
    for phase in PHASES:
        assert phase in GUIDE


def test_the_guide_has_every_field_of_an_incident() -> None:
    opened = OpenIncident(1, 1, 0, 0, 0.0)
    for field in incident_record.superseded(opened, opened):
        assert f"`{field}`" in GUIDE, f"{field} of an incident"


def test_the_guide_has_every_kind_of_fault() -> None:
    [listed] = re.findall(r"kind: ([a-z_, ]+) \|", GUIDE)
    assert listed.split(", ") == [*FAULT_KINDS]


def test_the_guide_has_every_field_of_a_checkpoint() -> None:
    for field in checkpoints.CheckpointSummary("name", "path", "", False).as_json():
        assert f"`{field}`" in GUIDE, f"{field} of checkpoints --json"


def test_the_guide_has_every_metric_and_bucket() -> None:
    for metric in METRICS:
        assert f"`{metric.exported}`" in GUIDE, f"metric {metric.exported}"
    for bucket in Bucket:
        assert bucket.value in GUIDE


def test_the_phase_diagram_is_generated_from_the_transition_table() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    section = text.partition("\n## The phases of a job\n")[2].partition("\n## ")[0]
    assert re.findall(r"^```mermaid\n(.*?)\n```$", section, re.MULTILINE | re.DOTALL) == [mermaid()]
    for action in {kind for row in TRANSITIONS.values() for kind in row} - {Look, Dismiss}:
        assert f"`{action.__name__}`" in section


def test_the_page_on_failure_modes_has_a_line_for_every_kind_of_fault() -> None:
    text = (ROOT / "docs" / "failure-modes.md").read_text()
    section = text.partition("\n## Kinds of faults\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| .+ \| (\d) \|$", section, re.MULTILINE)
    assert rows == [(kind.name, str(kind.precedence)) for kind in FAULT_KINDS.values()]


def test_every_decision_record_is_listed() -> None:
    folder = ROOT / "docs" / "adr"
    listed = (folder / "README.md").read_text()
    for path in folder.glob("[0-9]*.md"):
        title = path.read_text().partition("\n")[0].removeprefix("# ")
        number, _, words = title.partition(": ")
        assert path.name.startswith(number)
        assert f"[{number}]({path.name}) | {words} |" in listed


def test_the_glossary_has_one_sentence_for_each_of_at_most_25_words() -> None:
    rows = re.findall(
        r"^\| \*\*(.+?)\*\* \| (.+) \|$", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE
    )
    words = [word for row, _ in rows for word in row.split(", ")]
    assert 0 < len(words) <= 25
    assert len(set(words)) == len(words)
    for word, meaning in rows:
        assert word.count(", ") <= 1, f"{word}: more than a pair"
        assert meaning.endswith("."), word
        assert ". " not in meaning, f"{word}: more than one sentence"


def test_the_readme_is_short_and_shows_the_recovery_picture() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 120
    assert "](docs/recovery.svg)" in text
    assert text.index("make demo-quick") < text.index("holdfast run ")


def test_the_readme_names_the_wheel_of_this_version() -> None:
    assert f"holdfast-{__version__}-py3-none-any.whl" in (ROOT / "README.md").read_text()


def test_no_document_contains_a_path_of_a_developers_machine() -> None:
    for path in DOCUMENTS:
        assert not re.search(r"/(work|root|home)/", path.read_text()), path.name


@pytest.mark.parametrize("name", [each.name for each in environment.VARIABLES.values() if each.for_users])
def test_the_guide_lists_each_variable_that_users_set_or_read(name: str) -> None:
    section = GUIDE.partition("\n## Environment variables\n")[2].partition("\n## ")[0]
    assert f"`{name}`" in section


def test_the_page_on_kubernetes_lists_each_annotation_with_what_it_accepts_and_means() -> None:
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    found = dict(re.findall(r"^\| `(holdfast\.dev/[a-z-]+)` \| (.*) \| [^|]* \|$", page, re.MULTILINE))
    expected = {}
    for key, option in ANNOTATIONS.items():
        value = option.value
        accepts = (value.accepts or value.expected) if value is not None else '"true" or "false"'
        expected[key] = f"{accepts} | {option.help}"
    assert found == expected
    row = next(line for line in page.splitlines() if line.startswith("| `holdfast.dev/member-timeout`"))
    assert row.endswith(f"| {span(MEMBER_TIMEOUT_S)} |"), "it is longer than that of a run on one machine"
    assert f"up to {MAX_MEMBERS:,} members and up to {MAX_JOB_RANKS:,} ranks in all" in page


def test_the_guide_says_how_to_halt_the_owners_that_the_table_of_kinds_says_can_be_halted() -> None:
    text = (ROOT / "docs" / "kubernetes.md").read_text().partition("## Stopping a job")[2]
    rows = [line.split("|") for line in text.splitlines() if line.startswith("| ")][1:]
    halts = {(row.kind, row.halt.rpartition(".")[2]): row.halt for row in shipped().owners}
    for _, kinds, _, how, _ in rows[:5]:
        for kind in kinds.strip().split(", "):
            halt = next(halts[kind, word] for word in ("suspend", "replicas") if (kind, word) in halts)
            expected = {"spec.replicas": "--replicas=0"}.get(halt, halt)
            assert expected in how.replace('"spec": {"suspend": true}', "spec.suspend"), kind

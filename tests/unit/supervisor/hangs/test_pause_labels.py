"""The user chooses the label of a pause. The pause is judged in the same way, whatever its label.

The pages are written and read as in a run, from the rank through the sidecar to the supervisor's decision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from holdfast.protocol.launcher_messages import Ending, StartTimes
from holdfast.protocol.member_messages import RankStall
from holdfast.protocol.progress import NOT_BEGUN, Phase, name_of, pause_phase
from holdfast.protocol.progress_writer import Page
from sidecar.watch.late_ranks import HangPolicy
from sidecar.watch.progress_monitor import ProgressMonitor
from supervisor.decision.decide import decide
from supervisor.hangs import detection, observation
from supervisor.observability.bookkeeping import Bookkeeping
from supervisor.view import uneven_steps
from supervisor.view.model import Policy, StallWatch, View
from tests.sandbox import memory_directory
from tests.unit.supervisor.hangs.test_detection import WAITS
from tests.unit.supervisor.job_views import S, launcher, member, rank, report, view

OF_ITS_OWN = "evaluation"  # a label that is no word of Holdfast's
OWN_PHASE = {"eval", "checkpoint"}  # the names of phases that a script declares by these labels
LABELS = [*sorted({name_of(phase) for phase in Phase} - OWN_PHASE), NOT_BEGUN, "after commit", "running", ""]
POLICY = Policy(members=1, nproc=2)
STARTED = StartTimes(first_step_ns=1)


@pytest.fixture
def here() -> Iterator[Path]:
    with memory_directory() as path:
        yield path


@dataclass
class Group:
    """Two ranks of a member. A situation determines what happens to them and when they are observed."""

    here: Path
    now_ns: int = 100 * S

    def __post_init__(self) -> None:
        self.pages = [Page.create(self.here / f"page-{n}.bin", lambda: self.now_ns) for n in range(2)]
        self.ranks = [rank(n, marks=STARTED) for n in range(2)]
        self.monitor = ProgressMonitor(self.here, 2, HangPolicy())
        self.stalls: list[RankStall] = []
        self.looks: tuple[Any, ...] = ()
        self.watch = StallWatch(1)
        self.seen: list[View] = []
        for number, page in enumerate(self.pages):
            page.begin(1, number, number, 77 + number, 0)
        for step in range(1, 41):
            self.steps(step)

    def steps(self, step: int, ranks: tuple[int, ...] = (0, 1)) -> None:
        self.now_ns += S // 10
        for number in ranks:
            for phase in (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER):
                self.pages[number].phase(phase)
            self.pages[number].commit(step, 0.5, 0.5, 8, 64, 0.0, 0)

    def pauses(self, label: str, *ranks: int, limit_s: float = 30.0) -> None:
        for number in ranks:
            self.pages[number].pause(pause_phase(label), label, limit_s)

    def look(self, seconds: float) -> View:
        """Let time pass, and return the supervisor's view."""
        self.now_ns += int(seconds * S)
        self.stalls = self.monitor.poll(1, self.now_ns, 0.0)
        told = report(
            "m0",
            launcher(*self.ranks),
            progress=self.monitor.progress(1, self.now_ns),
            stalls=tuple(self.stalls),
            looks=self.looks,
            looked_for=1,
        )
        given: dict[str, Any] = {"placement": ("m0",), "nproc": 2, "world_size": 2, "settled": True}
        now = view(member("m0", told), now_s=self.now_ns / S, **given)
        self.watch = observation.update(self.watch, now)
        now = replace(now, watch=self.watch)
        self.seen.append(now)
        return now

    def close(self) -> None:
        """Close the files. Otherwise the garbage collector would close them later, in another test."""
        for page in self.pages:
            page.close()
        for watched in self.monitor._watched:
            if watched.memory is not None:
                watched.memory.close()

    def set(self, number: int, **given: Any) -> None:
        self.ranks[number] = replace(self.ranks[number], **given)


def within_its_limit(group: Group, label: str) -> None:
    group.pauses(label, 0)
    group.pages[1].phase(Phase.DATA)
    group.look(5.0)


def beyond_its_limit(group: Group, label: str) -> None:
    group.pauses(label, 0)
    group.pages[1].phase(Phase.DATA)
    group.look(5.0)
    group.looks = (replace(WAITS, rank=1, step=40, number=1),)
    group.look(26.0)
    group.look(10.0)


def beyond_the_limit_of_both(group: Group, label: str) -> None:
    group.pauses(label, 0, 1)
    group.looks = tuple(replace(WAITS, rank=n, step=40, number=1) for n in range(2))
    group.look(31.0)
    group.look(31.0)


def one_after_another(group: Group, label: str) -> None:
    group.pauses(label, 0)
    group.look(31.0)
    group.pages[0].resume()
    group.pauses(label, 0)
    group.look(1.0)
    group.look(31.0)


def in_another_pause_that_is_over(group: Group, label: str) -> None:
    """One rank has left its pause, whose label its page still has."""
    group.pauses(label, 0, 1)
    group.look(1.0)
    group.pages[0].resume()
    group.look(20.0)


def stopped(group: Group, label: str) -> None:
    group.pauses(label, 0)
    group.set(0, stopped=True)
    group.look(1.0)
    group.look(2.0)
    group.look(60.0)


def failed(group: Group, label: str) -> None:
    group.pauses(label, 0)
    group.pages[0].fail(1, 1)
    group.pages[1].phase(Phase.DATA)
    group.look(31.0)


def while_the_other_has_left(group: Group, label: str) -> None:
    group.pauses(label, 0)
    group.set(1, state="exited", ending=Ending(1, 0))
    group.look(1.0)
    group.looks = (replace(WAITS, rank=0, step=40, number=1),)
    group.look(20.0)
    group.look(31.0)


def left_from_it(group: Group, label: str) -> None:
    group.steps(41, (1,))
    group.pages[1].phase(Phase.DATA)
    group.pauses(label, 0)
    group.set(0, state="exited", ending=Ending(1, 0))
    group.look(1.0)
    group.look(20.0)


def all_left_from_it(group: Group, label: str) -> None:
    group.pauses(label, 0, 1)
    for number in range(2):
        group.set(number, state="exited", ending=Ending(1, 0))
    group.look(1.0)


def after_a_commit(group: Group, label: str) -> None:
    for page in group.pages:
        page.commit(41, 0.5, 0.5, 8, 64, 0.0, 0, -1, Phase.TAIL)
        page.tail_begins()
    group.pauses(label, 0)
    group.look(10.0)
    group.look(31.0)


SITUATIONS: list[Callable[[Group, str], None]] = [
    within_its_limit,
    beyond_its_limit,
    beyond_the_limit_of_both,
    one_after_another,
    in_another_pause_that_is_over,
    stopped,
    failed,
    while_the_other_has_left,
    left_from_it,
    all_left_from_it,
    after_a_commit,
]


@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize("happens", SITUATIONS, ids=lambda each: each.__name__)
def test_a_pause_is_judged_in_the_same_way_whatever_its_label_is(
    here: Path, happens: Callable[[Group, str], None], label: str
) -> None:
    assert _judgements(here, happens, label) == _judgements(here, happens, OF_ITS_OWN)


def _judgements(here: Path, happens: Callable[[Group, str], None], label: str) -> list[dict[str, Any]]:
    """Return every conclusion from the reports, without the label."""
    group = Group(here)
    happens(group, label)
    group.close()
    books = Bookkeeping(0, None)
    found: list[dict[str, Any]] = []
    for seen in group.seen:
        books.observe(seen)
        verdict = detection.judge(seen, POLICY)
        [there] = seen.members
        assert there.report is not None
        found.append(
            {
                "stalls": there.report.stalls,
                "phases": [each.phase for each in there.report.progress],
                "watch": seen.watch,
                "verdict": verdict and _without(label, asdict(verdict)),
                "decision": _without(label, asdict(decide(seen, POLICY))),
                "uneven": uneven_steps.find_uneven_steps(seen),
                "accounts": books.ledger.activity,
            }
        )
    assert found, "this situation never occurred"
    return found


def _without(label: str, value: Any) -> Any:
    """Return `value` with a fixed text in place of the label wherever a sentence shows it."""
    if isinstance(value, dict):
        return {key: _without(label, each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without(label, each) for each in value]
    if not isinstance(value, str):
        return value
    shown = label or name_of(Phase.PAUSED)  # without a label the phase is shown
    for around in ("has been in {} for", "hang in {}", "(state T) in {}", "hang at {}:"):
        value = value.replace(around.format(shown), around.format("LABEL"))
    return value


def test_the_label_is_shown_in_every_sentence_about_the_pause(here: Path) -> None:
    group = Group(here)
    beyond_its_limit(group, "validation")
    group.close()
    found = detection.judge(group.seen[-1], POLICY)
    assert found is not None
    assert found.fault is not None
    assert found.why == "rank 0 hangs: it has been in validation for 41.0 s (limit for this activity: 30 s)"
    assert found.fault.signature == "hang in validation"


def test_without_a_label_the_phase_is_shown(here: Path) -> None:
    group = Group(here)
    for page in group.pages:
        page.commit(41, 0.5, 0.5, 8, 64, 0.0, 0, -1, Phase.TAIL)
        page.fail(1, 1)
    found = detection.judge(group.look(40.0), POLICY)
    group.close()
    assert found is not None
    assert found.why == "rank 0 hangs: it has been in after commit for 40.0 s (limit for this activity: 30 s)"

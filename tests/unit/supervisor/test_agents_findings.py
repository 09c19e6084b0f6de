"""The shapes in which the agent reports common fatal faults: which nodes are drained, and which only tainted,
and what an operator's release covers of them.

The real evaluator judges the observations, and the quarantine reads the report that the agent sends.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest

from nodeagent.agent.agent import Published
from nodeagent.evaluation.evaluator import Evaluator
from nodeagent.model import NODE, Observation
from nodeagent.policy.loading import shipped
from nodeagent.server.report import health_report
from supervisor.quarantine.decide import decide
from supervisor.quarantine.model import Drain, Hold, NodeView, RunFault, Taint
from supervisor.quarantine.reports import read_report
from supervisor.quarantine.transition import released_by_operator
from tests.unit.supervisor.node_views import (
    NOW_S,
    POLICY,
    applied,
    asked,
    at,
    node_of,
    pool,
    settled,
    why,
)

GPU, UUID = "gpu/0000:3b:00.0", "GPU-1"
SHIPPED = shipped()
FOR_S = 1200  # longer than a single witness needs
Seen = list[Observation]


def samples(check: str, entity: str, source: str, value: float, *, until_s: int = FOR_S) -> Seen:
    step = int(SHIPPED.rules[check].period_s) or 5
    return [Observation(float(t), check, entity, source, value) for t in range(0, until_s + 1, step)]


def xid(code: int, variant: str = "", source: str = "kmsg") -> Seen:
    return [Observation(1.0, "xid", GPU, source, float(code), variant)]


HANGING = samples("sensor_stuck", "sensor/nvml-polling", "agent", 70.0)
STUCK = samples("gpu_process_stuck", NODE, "host", 1.0)
LINKS = samples("nvlink_down", GPU, "nvml-polling", 18.0)
FEWER = samples("gpu_count", NODE, "nvml-polling", 1.0)
PAGES = samples("retired_pages", GPU, "nvml-polling", 60.0)
LOST = samples("gpu_state", GPU, "nvml-polling", 1.0)
ERRORS = [
    Observation(at_s, "ecc_dbe", GPU, source, value)
    for at_s, source, value in (
        (0.0, "nvml-polling", 0.0), (2.0, "nvml-events", 1.0), (12.0, "nvml-polling", 2.0),
    )
]  # fmt: skip
LINK_ERROR = xid(74, ",".join(["0x10", *["0x0"] * 6]))
KNOWN = [
    Observation(
        -1.0, "gpu_state", GPU, "nvml-polling", 0.0, facts=(("uuid", UUID), ("name", "NVIDIA H100 80GB HBM3"))
    )
]


def reported(seen: Iterable[Observation], now_s: float = FOR_S, *, older: bool = False) -> NodeView:
    """Return the node as the quarantine knows it by the agent's report.

    With `older`, the agent does not say which findings are about events.
    """
    seen = sorted([*KNOWN, *seen])
    judged = Evaluator(SHIPPED, 500)
    for each in seen:
        judged.add(each)
    published = Published(now_s, judged.verdicts(now_s), facts={GPU: {"uuid": UUID}})
    boots = [each.at_s for each in seen if each.check == "boot"]
    about = {"boot_id": f"b{len(boots) + 1}", "version": "1", "booted_s": max(boots, default=-1e6)}
    raw = json.loads(json.dumps(health_report(published, about)))
    for each in raw["entities"] if older else ():
        for finding in each["findings"]:
            del finding["sign_s"]
    return NodeView("a", read_report(raw), 10.0, busy=True, version="7")


def is_drained(node: NodeView) -> bool | None:
    """Return whether the node's work is ended; None if the node stays in service."""
    out = node_of(settled(pool(node)), "a").quarantine
    return None if out is None else out.drain_at_s is not None


SHAPES = {
    "a driver that hangs": (HANGING, STUCK),
    "NVLinks that are down, and an Xid about them": (LINKS, LINK_ERROR),
    "a GPU that is missing, and an Xid about it": (FEWER, xid(79)),
    "retired pages, and a page that could not be retired": (PAGES, xid(64)),
    "uncorrectable errors, and an Xid about them": (ERRORS, xid(48)),
    "a lost GPU, and an Xid about it": (LOST, xid(79)),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_a_fault_that_two_witnesses_report_is_drained_and_one_witness_only_tainted(
    shape: tuple[Seen, Seen],
) -> None:
    first, second = shape
    assert is_drained(reported([*first, *second])) is True
    assert is_drained(reported(first)) is False
    assert is_drained(reported(second)) is False


@pytest.mark.parametrize(
    "seen", [shape[0] for shape in SHAPES.values()], ids=[each.partition(",")[0] for each in SHAPES]
)
def test_a_training_run_is_the_second_witness_of_each_shape(seen: Seen) -> None:
    node = replace(reported(seen), runs=(RunFault(NOW_S - 30.0, UUID),))
    assert is_drained(node) is True


def test_two_sensors_that_read_one_counter_are_one_witness() -> None:
    report = reported(ERRORS).report
    assert report is not None
    [found] = report.findings
    assert (found.sources, found.origins, found.lasting) == (
        ("nvml-events", "nvml-polling"), ("driver state",), True,
    )  # fmt: skip
    assert is_drained(reported([*HANGING, *FEWER])) is False, "both are calls of NVML"


def test_the_drain_waits_until_the_fault_is_confirmed() -> None:
    [early] = decide(pool(reported([*LOST, *xid(79)], 50.0)), POLICY)
    assert isinstance(early, Hold)
    view = pool(reported([*LOST, *xid(79)], 70.0))
    [taint] = asked(view)
    assert isinstance(taint, Taint)
    [drain] = asked(applied(view, [taint]))
    assert isinstance(drain, Drain)


@pytest.mark.parametrize(
    ("check", "bad", "entity", "source"),
    [
        ("sensor_stuck", 70.0, "sensor/nvml-polling", "agent"),
        ("gpu_process_stuck", 1.0, NODE, "host"),
        ("nvlink_down", 18.0, GPU, "nvml-polling"),
        ("gpu_count", 1.0, NODE, "nvml-polling"),
        ("retired_pages", 60.0, GPU, "nvml-polling"),
    ],
)
def test_a_level_lasts_only_while_its_newest_sample_shows_the_fault(
    check: str, bad: float, entity: str, source: str
) -> None:
    def lasting(seen: Seen, now_s: float) -> list[tuple[str, bool]]:
        report = reported(seen, now_s).report
        assert report is not None
        return [(each.signature.split()[0], each.lasting) for each in report.findings]

    seen = samples(check, entity, source, bad)
    assert lasting(seen, FOR_S) == [(check, True)]
    well = Observation(FOR_S + 1.0, check, entity, source, 0.0)
    assert lasting([*seen, well], FOR_S + 1.0) == [(check, False)], "nothing needs an empty node any more"
    booted = Observation(FOR_S + 1.0, "boot", NODE, "agent")
    ends = check != "retired_pages"
    assert lasting([*seen, booted], FOR_S + 1.0) == [(check, not ends)], "the old samples do not show it"
    again = Observation(FOR_S + 60.0, check, entity, source, bad)
    assert lasting([*seen, booted, again], FOR_S + 60.0) == [(check, True)]


FIRST_S, BOOT_S, AGAIN_S, LATE_S = 100.0, 4000.0, 4500.0, 4600.0  # agent time; the release is at FOR_S
BOOT = Observation(BOOT_S, "boot", NODE, "agent", facts=(("last_s", repr(BOOT_S - 60.0)),))


def growth(at_s: float) -> Seen:
    """Return two readings of a counter, which by then has grown by 2 more than before."""
    before = 0.0 if at_s == FIRST_S else 2.0
    return [
        Observation(at_s - 10.0, "ecc_dbe", GPU, "nvml-polling", before),
        Observation(at_s, "ecc_dbe", GPU, "nvml-polling", before + 2.0),
    ]


EVENTS: dict[str, Callable[[float], Seen]] = {
    "an Xid": lambda at_s: [Observation(at_s, "xid", GPU, "kmsg", 79.0)],
    "a line of the kernel": lambda at_s: [Observation(at_s, "kernel_gpu_init_failed", GPU, "kmsg", 0.0)],
    "a line of the kernel about no GPU": lambda at_s: [
        Observation(at_s, "kernel_gpu_init_failed_unnamed", "driver", "kmsg", 0.0)
    ],
    "growth": growth,
}
STATE = samples("gpu_state", GPU, "nvml-polling", 1.0, until_s=int(BOOT_S) - 10)


def after_a_release(seen: Seen, later: Seen, now_s: float, *, older: bool = False) -> list[str]:
    """Return the names of the actions at `now_s` on a node that an operator released at `FOR_S`.

    Without an action, return the reason of the hold.
    """
    out = settled(pool(reported([each for each in seen if each.at_s <= FOR_S], older=older)))
    assert node_of(out, "a").quarantine is not None
    freed = released_by_operator(node_of(out, "a"), NOW_S)
    report = reported([*seen, *later], now_s, older=older).report
    view = at(out, NOW_S + now_s - FOR_S, replace(freed, report=report))
    return [type(each).__name__ for each in asked(view)] or [why(view, "a")]


WAIVED = ["an operator has released it, and no other fault has been found since"]


@pytest.mark.parametrize("event", EVENTS.values(), ids=EVENTS.keys())
def test_an_operators_release_covers_an_event_until_its_next_sign(event: Callable[[float], Seen]) -> None:
    seen = event(FIRST_S)
    assert after_a_release(seen, [], LATE_S) == WAIVED
    assert after_a_release(seen, event(AGAIN_S), LATE_S) == ["Taint"]


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("event", EVENTS.values(), ids=EVENTS.keys())
def test_an_event_that_a_boot_has_ended_does_not_undo_an_operators_release(
    event: Callable[[float], Seen], older: bool
) -> None:
    seen = event(FIRST_S)
    assert after_a_release(seen, [BOOT], BOOT_S + 100.0, older=older) == WAIVED
    assert after_a_release(seen, [BOOT, *event(AGAIN_S)], LATE_S) == ["Taint"]


def test_an_operators_release_covers_what_samples_show_until_they_show_it_after_a_boot() -> None:
    for older in (False, True):
        assert after_a_release(STATE, [], BOOT_S, older=older) == WAIVED, "more samples are no new evidence"
        assert after_a_release(STATE, [BOOT], BOOT_S + 5.0, older=older) == WAIVED, "none since the boot"
        shown = [Observation(BOOT_S + 5.0, "gpu_state", GPU, "nvml-polling", 1.0)]
        assert after_a_release(STATE, [BOOT, *shown], BOOT_S + 10.0, older=older) == ["Taint"]

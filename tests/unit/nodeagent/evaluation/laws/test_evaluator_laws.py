"""Laws of the evaluator and its memory, whatever happens to a node.

1. A finding that stands ends only by its remedy and a quiet time after it, or by an operator's word; and the
   remedy that a finding names does end it.
2. The age of a finding never falls while it stands.
3. No limit lets a fault of a GPU or of the node be refused or dropped.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nodeagent.agent.inbox import Inbox
from nodeagent.evaluation.evaluator import Evaluator
from nodeagent.evaluation.evidence import LAST_SEEN
from nodeagent.evaluation.quotas import MAX_VARIANTS
from nodeagent.evaluation.retention import FORGET_S
from nodeagent.model import Action, HealthFinding, Level, Observation
from nodeagent.policy.loading import load, shipped
from tests.unit.nodeagent.evaluation.world import DAY_S, GPU, mark, xid

POLICY = shipped()
HOLD_S = 600.0  # of every code below
REMEDIES = {
    Action.RESET_GPU: ("gpu_reset", "boot", "replaced"),
    Action.REBOOT_NODE: ("boot", "replaced"),
    Action.REPLACE: ("replaced",),
    Action.CONTACT_SUPPORT: ("gpu_reset", "boot", "replaced"),  # an NVLink's recurring fault
}
# The driver sends its verdict at once. One that comes later only says what it recommends now.
WITH_ITS_CODE_S = 10.0
MOMENT_S = 0.001

Key = tuple[str, int | None]
Step = tuple[float, str]  # the time since the last step, and what happens
FAULTS = [f"xid {code}" for code in (31, 48, 64, 79, 94, 95, 119, 143)]
# More variants of one NVLink fault than the evaluator keeps, all of which mean the same.
LINK_FAULTS = [f"link {0x00200011 + (n << 7):#010x}" for n in range(MAX_VARIANTS + 8)]
WORDS = ["154 none", "154 reset_gpu", "154 reboot_node"]
# Codes with the verdict that the driver sends 0.5 s later, and reports of one link by two sensors.
STORM = ["95", "95 reboot_node", "74", "74 drain_p2p", "79", "79 reset_gpu", "48 reset_gpu", "48 reboot_node"]
SENSORS = ["detailed", "plain", "double", "reset"]
MARKS = ["gpu_reset", "boot", "replaced", "cleared"]
MODES = ["mig off", "mig on", "mig on, off pending"]
CHORES = ["restart", "reload", "forget", "look"]
OTHER_LINK_FAULT = "link 0x00000011"  # as severe, but its bursts never count as a recurrence
LINKS = ["all links", *LINK_FAULTS[:3], OTHER_LINK_FAULT]
STEPS = st.lists(
    st.tuples(
        st.sampled_from([0.5, 4.0, 60.0, 240.0, 400.0, 700.0, 7200.0, DAY_S, 31 * DAY_S]),
        st.one_of(*(st.sampled_from(each) for each in (FAULTS, FAULTS, LINKS, WORDS, MARKS, MODES, CHORES))),
    ),
    max_size=30,
)


@dataclass(slots=True)
class Life:
    """A node's agent, and what happened to the node, in the order of time."""

    evaluator: Evaluator = field(default_factory=lambda: Evaluator(POLICY, 575))
    now_s: float = 1000.0
    past: list[tuple[float, str]] = field(default_factory=list)
    shown: dict[Key, HealthFinding] = field(default_factory=dict)

    def live(self, step: Step) -> None:
        wait_s, what = step
        self.now_s += wait_s
        self.look(self.now_s - MOMENT_S)  # only time has passed
        self.happen(what)
        self.look(self.now_s)

    def happen(self, what: str) -> None:
        self.past.append((self.now_s, what))
        kind, _, name = what.partition(" ")
        if kind == "xid":
            self.evaluator.add(xid(int(name), self.now_s))
        elif kind == "154":
            self.evaluator.add(xid(154, self.now_s, name))
        elif kind == "link":
            self.evaluator.add(xid(149, self.now_s, f"NETIR_LINK_DOWN Fatal {name} 0x00000001"))
        elif what == "all links":
            for n, each in enumerate(LINK_FAULTS):
                self.now_s += MOMENT_S if n else 0.0
                self.happen(each)
        elif kind == "mig":
            facts = (("name", "NVIDIA A100-SXM4-80GB"), ("uuid", "GPU-a"), ("mig", name))
            self.evaluator.add(Observation(self.now_s, "gpu_state", GPU, "nvml-polling", facts=facts))
        elif what in MARKS:
            self.evaluator.add(mark(what, self.now_s))
        elif what == "reload":
            self.evaluator.use(replace(POLICY))
        elif what == "restart":
            restarted = Evaluator(POLICY)
            restarted.load(json.loads(json.dumps(self.evaluator.dump())))
            self.evaluator = restarted
        elif what == "forget":
            self.evaluator.forget(self.now_s - FORGET_S)

    def look(self, at_s: float) -> None:
        found = {(each.check, each.code): each for each in self.evaluator.findings(at_s)}
        for key, before in self.shown.items():
            self.judge(before, found.get(key), at_s)
        self.shown = found

    def judge(self, before: HealthFinding, now: HealthFinding | None, at_s: float) -> None:
        """Check that nothing has ended, become milder or younger without a reason."""
        if now is None or (now.level, now.action) < (before.level, before.action):
            assert before.level is not Level.UNHEALTHY or self.may_end(before, now, at_s), (before, now)
        if now is not None and now.level <= before.level and not self.since(before.since_s, "replaced"):
            assert now.since_s <= before.since_s, (before, now)

    def may_end(self, before: HealthFinding, now: HealthFinding | None, at_s: float) -> bool:
        if self.since(before.last_s, "cleared"):
            return True
        if now is not None and (now.overridden == "driver" or now.code == 154):
            return self.since(at_s - WITH_ITS_CODE_S - HOLD_S, *WORDS)  # the driver's newest word
        remedies = list(REMEDIES.get(before.action, ()))
        by_reset = before.action is Action.RESET_GPU or before.overridden == "driver" or before.code == 154
        by_reset = by_reset and " times within " not in before.why
        remedies += ["154 none"] if by_reset or before.action is Action.CONTACT_SUPPORT else []
        hold_s = HOLD_S if now is None else 0.0
        return any(
            name in remedies and before.last_s < when_s <= at_s - hold_s + 2 * MOMENT_S
            for when_s, name in self.past
        )

    def since(self, from_s: float, *names: str) -> bool:
        return any(when_s >= from_s and name in names for when_s, name in self.past)


@given(STEPS)
@settings(max_examples=200)
@example([(1.0, "xid 79"), (700.0, "boot"), (DAY_S, "xid 79"), (60.0, "boot"), (700.0, "look")])
@example([(1.0, "xid 64"), (31 * DAY_S, "forget"), (1.0, "restart")])
@example([(0.5, "154 reset_gpu"), (31 * DAY_S, "forget")])
@example([(240.0, "xid 119") for _ in range(5)])
@example([(1.0, "xid 119"), (DAY_S, "xid 119"), (0.5, "xid 119")])
@example([(1.0, "xid 79"), (0.5, "154 none"), (0.5, "look")])
@example([(1.0, "154 none"), (0.5, "xid 79"), (700.0, "look")])
@example([(1.0, LINK_FAULTS[0]), *[(60.0, "all links")] * 3, (1.0, "restart"), (1.0, "all links")])
@example([*[(240.0, LINK_FAULTS[0])] * 5, (0.5, "all links"), (1.0, "gpu_reset"), (1.0, "all links")])
@example([(1.0, "mig off"), (1.0, "xid 95"), (60.0, "gpu_reset"), (1.0, "restart"), (700.0, "mig on")])
@example([(1.0, "mig off"), (1.0, "xid 64"), (1.0, "gpu_reset"), (31 * DAY_S, "restart"), (1.0, "forget")])
@example([(1.0, "mig on"), (1.0, "xid 95"), (1.0, "gpu_reset"), (400.0, "mig off"), (700.0, "look")])
@example(
    [
        (0.5, "all links"),
        (0.5, "154 reboot_node"),
        (60.0, "154 none"),
        (0.5, LINK_FAULTS[0]),
        (700.0, "look"),
    ]
)
@example([*[(4000.0, LINK_FAULTS[0])] * 5, (60.0, "gpu_reset"), (0.5, LINK_FAULTS[1]), (700.0, "look")])
@example([*[(4000.0, LINK_FAULTS[0])] * 5, (60.0, "gpu_reset"), (0.5, OTHER_LINK_FAULT), (700.0, "look")])
def test_a_finding_ends_only_by_its_remedy_and_its_age_never_falls_while_it_stands(
    steps: list[Step],
) -> None:
    life = Life()
    for step in steps:
        life.live(step)


@given(STEPS, st.booleans())
@settings(max_examples=100)
@example([(1.0, "xid 64"), (0.5, "154 reset_gpu")], True)
@example([(1.0, "xid 79"), (0.5, "154 reset_gpu")], False)
def test_the_remedy_that_a_finding_names_ends_it(steps: list[Step], restart: bool) -> None:
    life = Life()
    for step in steps:
        life.live(step)
    for before in [each for each in life.shown.values() if each.lasting and each.action in REMEDIES]:
        remedied = Life(Evaluator(POLICY, 575), life.now_s, list(life.past))
        remedied.evaluator.load(json.loads(json.dumps(life.evaluator.dump())))
        remedied.live((60.0, REMEDIES[before.action][0]))
        remedied.live((1.0, "restart" if restart else "look"))
        after = remedied.evaluator.findings(life.now_s + 60.0 + HOLD_S)
        assert (before.check, before.code) not in {(each.check, each.code) for each in after}, before


def flood(made: Evaluator, of: str, at_s: float) -> None:
    """Add healthy samples and lasting events of thousands of other entities."""
    for n in range(4200 if of != "events" else 0):
        made.add(Observation(at_s, "disk_used", f"disk//var/lib/kubelet/pods/{n}", "host", 10.0))
    for n in range(2100 if of != "samples" else 0):
        made.add(Observation(at_s, "kernel_buffer_io_error", f"disk/sd{n}", "kmsg"))


GRAVE = {
    "event of a GPU": Observation(0.0, "xid", GPU, "kmsg", 79.0),
    "sample of a GPU": Observation(0.0, "gpu_state", GPU, "nvml-polling", 1.0),
    "event of the node": Observation(0.0, "kernel_panic", "node", "kmsg"),
    "sample of the node": Observation(0.0, "nvml", "driver", "nvml-polling", 2.0),
}


@pytest.mark.parametrize("what", list(GRAVE))
@pytest.mark.parametrize(("of", "at_s", "first"), [
    ("samples", 2e6, False), ("events", 1.0, True), ("both", 1e6, False), ("both", 1e6 + 5, True),
])  # fmt: skip
def test_no_flood_takes_the_place_of_a_fault_of_a_gpu_or_the_node(
    what: str, of: str, at_s: float, first: bool
) -> None:
    grave = GRAVE[what]
    made = Evaluator(POLICY, 575)
    seen = [
        Observation(at_s + wait_s, grave.check, grave.entity, grave.source, grave.value)
        for wait_s in (0.0, 30.0, 60.0)
    ]
    for each in seen if first else []:
        made.add(each)
    flood(made, of, 1e6)
    for each in [] if first else seen:
        made.add(each)
    restored = Evaluator(POLICY, 575)
    restored.load(made.dump())
    flood(restored, of, 1e6 + 100)
    levels = {each.level for each in restored.findings(3e6) if each.entity == grave.entity}
    assert Level.UNHEALTHY in levels


@given(st.lists(st.sampled_from(["gpu", "disk", "node"]), max_size=20))
def test_what_is_refused_is_counted(kinds: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for limit in ("MAX_SERIES", "MAX_EVENTS", "MAX_OWN"):
            patch.setattr(f"nodeagent.evaluation.quotas.{limit}", 3)
        made = Evaluator(POLICY, 575)
        for n, kind in enumerate(kinds):
            before = made.dropped
            for check, value in (("disk_read_only", 1.0), ("xid", 79.0)):
                added = made.add(Observation(float(n), check, f"{kind}/{n}", "kmsg", value))
                assert added or made.dropped > before
            assert made.dropped == max(0, 2 * (len([k for k in kinds[: n + 1] if k == kind]) - 3)) + sum(
                max(0, 2 * (kinds[: n + 1].count(k) - 3)) for k in {*kinds[: n + 1]} - {kind}
            )


Judged = tuple[Level, Action, float]


def judged(made: Evaluator, code: int, now_s: float) -> Judged:
    """Return a code's level, action and age; the greatest is the most severe."""
    found = [(f.level, f.action, now_s - f.since_s) for f in made.findings(now_s) if f.code == code]
    return max(found, default=(Level.HEALTHY, Action.NONE, 0.0))


@given(
    st.lists(st.tuples(st.sampled_from([0.6, 4.0, 50.0, 170.0, 400.0]), st.sampled_from(STORM)), max_size=16)
)
@settings(max_examples=200)
@example([(0.6, "95 reboot_node"), (50.0, "74 drain_p2p"), (50.0, "95")])
@example([(0.6, "79"), (50.0, "48 reset_gpu"), (50.0, "79")])
def test_the_driver_lowers_only_the_code_that_its_verdict_follows(steps: list[Step]) -> None:
    made, now_s = Evaluator(POLICY, 575), 1000.0
    for wait_s, what in steps:
        now_s += wait_s
        code, _, verdict = what.partition(" ")
        before = {each: judged(made, each, now_s) for each in (48, 74, 79, 95)}
        made.add(xid(int(code), now_s))
        for each, known in before.items():
            assert judged(made, each, now_s)[:2] >= known[:2], (each, what)
        if verdict:
            now_s += 0.5
            made.add(xid(154, now_s, verdict))
            for each in {*before} - {int(code)}:
                assert judged(made, each, now_s)[:2] >= before[each][:2], (each, what)


@given(
    st.lists(st.tuples(st.sampled_from([20.0, 60.0, 100.0, 300.0]), st.sampled_from(SENSORS)), max_size=40)
)
@settings(max_examples=200)
@example([(60.0, "double"), (60.0, "reset"), *[(100.0, "plain")] * 20, (400.0, "detailed")])
@example([*[(100.0, "plain")] * 20, (60.0, "detailed")])
def test_a_report_without_details_counts_unless_it_is_a_double(steps: list[Step]) -> None:
    policy = load('[xid.149]\nlevel="unhealthy"\naction="reset_gpu"\nclears="reset"\n')
    made, now_s, newest_s, reset_s = Evaluator(policy, 575), 1000.0, 0.0, 0.0
    for wait_s, what in steps:
        now_s += wait_s
        stood = [each for each in made.findings(now_s) if each.code == 149]
        if what == "reset":
            made.add(mark("gpu_reset", now_s))
            reset_s = now_s
        if what in ("detailed", "double"):
            made.add(xid(149, now_s, "RLW Fatal 0x1 0x1"))
        if what in ("plain", "double"):
            made.add(xid(149, now_s + 0.1, source="nvml-events"))
        newest_s = newest_s if what == "reset" else now_s + 0.1
        stands = [each for each in made.findings(now_s + 0.2) if each.code == 149]
        if newest_s > reset_s:
            assert [each.lasting for each in stands] == [True], "no reset has come since"
            assert not stood or stands[0].since_s <= stood[0].since_s


@given(st.lists(st.tuples(st.sampled_from([0.3, 0.9, 30.0, 170.0, 500.0, 9000.0]), st.sampled_from([
    "xid 46", "xid 79", "154 reboot_node", "gpu_reset", "boot", "nvml 149", "link 149",
])), max_size=60))  # fmt: skip
@settings(max_examples=200)
@example([(9000.0, "xid 46")] * 6)
@example([(0.9, "xid 79"), (0.3, "boot")] * 6)
def test_a_backlog_yields_the_same_findings_as_its_events_one_by_one(steps: list[Step]) -> None:
    seen, now_s = [], 1000.0
    for wait_s, what in steps:
        now_s += wait_s
        kind, _, name = what.partition(" ")
        if kind in ("xid", "nvml", "link"):
            details = "RLW Fatal 0x1 0x1" if kind == "link" else ""
            seen.append(xid(int(name), now_s, details, "nvml-events" if kind == "nvml" else "kmsg"))
        else:
            seen.append(xid(154, now_s, name) if kind == "154" else mark(kind, now_s))
    inbox = Inbox(POLICY)
    inbox.put(seen)
    found = []
    for each_of in (seen, inbox.drain()):
        made = Evaluator(POLICY, 575)
        for each in each_of:
            made.add(each)
        found.append((made.findings(now_s), made.findings(now_s + 700.0)))
    assert found[0] == found[1]


@given(st.lists(st.tuples(st.floats(20.0, 900.0), st.floats(5.0, 900.0)), min_size=2, max_size=12))
@settings(max_examples=200)
def test_a_fault_after_each_boot_recurs_however_short_the_uptime_was(
    boots: list[tuple[float, float]],
) -> None:
    made, now_s = Evaluator(POLICY, 575), 1000.0
    for up_s, off_s in boots:
        made.add(xid(79, now_s + up_s / 2))
        now_s += up_s + off_s
        facts = ((LAST_SEEN, repr(now_s - off_s)),)
        made.add(Observation(now_s, "boot", "node", "agent", facts=facts))
    [found] = [each for each in made.findings(now_s + 1.0) if each.code == 79]
    assert found.action is Action.REPLACE
    assert f"{len(boots)} times within" in found.why

"""A small policy, and shorthands for observations."""

from __future__ import annotations

from collections.abc import Iterable

from nodeagent.evaluation.evaluator import Evaluator
from nodeagent.model import Action, HealthFinding, Level, Observation
from nodeagent.policy.rules import Bound, CheckState, Clears, HealthPolicy, Meaning, Recurs, Rule, RuleKind

GPU = "gpu/0000:3b:00.0"
DAY_S = 86400.0


def meaning(
    level: Level,
    action: Action,
    clears: Clears = Clears.TIME,
    hold_s: float = 600.0,
    recurs: Recurs | None = None,
    since: int | None = None,
    overridden: bool = False,
) -> Meaning:
    return Meaning("it", level, action, clears, hold_s, "test", recurs, since, overridden)


NOTHING = meaning(Level.HEALTHY, Action.NONE)
MARK = meaning(Level.HEALTHY, Action.NONE, hold_s=0.0)

POLICY = HealthPolicy(
    rules={
        "heat": Rule(
            "heat", RuleKind.LEVEL, "margin", "test", "°C", period_s=10, below=True,
            degraded=Bound(5, need=3, of=4), unhealthy=Bound(0, for_s=60), clear_at=10, clear_s=120,
            action=Action.CONTACT_SUPPORT,
        ),
        "errors": Rule(
            "errors", RuleKind.RATE, "errors", "test", period_s=10, window_s=60,
            degraded=Bound(50), unhealthy=Bound(200), clear_s=100, action=Action.RESET_GPU,
        ),
        "verdict": Rule(
            "verdict", RuleKind.STATE, "verdict", "test", period_s=10, clear_s=20,
            states={
                0: CheckState("none", Level.HEALTHY, Action.NONE),
                1: CheckState("reset", Level.UNHEALTHY, Action.RESET_GPU, why="so it says"),
                2: CheckState("slow", Level.DEGRADED, Action.NONE, for_s=60),
            },
        ),
        **{
            name: Rule(name, RuleKind.EVENT, name, "test", meaning=MARK)
            for name in ("gpu_reset", "boot", "replaced", "cleared")
        },
    },
    xids={
        13: meaning(
            Level.HEALTHY, Action.RESTART_APP,
            recurs=Recurs(2, DAY_S, Level.DEGRADED, Action.CONTACT_SUPPORT, same_variant=True),
        ),
        48: meaning(Level.UNHEALTHY, Action.RESET_GPU, Clears.RESET, since=565),
        64: meaning(Level.UNHEALTHY, Action.REPLACE, Clears.REPLACED),
        79: meaning(
            Level.UNHEALTHY, Action.REBOOT_NODE, Clears.BOOT, since=565,
            recurs=Recurs(2, 7 * DAY_S, Level.UNHEALTHY, Action.REPLACE),
        ),
        95: meaning(Level.DEGRADED, Action.NONE, since=565, overridden=True),
        154: NOTHING,
        46: meaning(Level.UNHEALTHY, Action.RESET_GPU, Clears.RESET),
    },
    sxids={},
    unknown_sxid=NOTHING,
    unknown_xid=NOTHING,
    version="test",
    words={
        ("xid154", "none"): NOTHING,
        ("xid154", "reset_gpu"): meaning(Level.UNHEALTHY, Action.RESET_GPU, Clears.RESET),
        ("xid154", "reboot_node"): meaning(Level.UNHEALTHY, Action.REBOOT_NODE, Clears.BOOT),
    },
)  # fmt: skip


def xid(code: int, at_s: float, variant: str = "", source: str = "kmsg", text: str = "") -> Observation:
    return Observation(at_s, "xid", GPU, source, float(code), variant, text)


def mark(name: str, at_s: float) -> Observation:
    return Observation(at_s, name, "node" if name == "boot" else GPU, "test")


def sample(check: str, at_s: float, value: float) -> Observation:
    return Observation(at_s, check, GPU, "polling", value)


Said = tuple[Level, Action]
RESET = (Level.UNHEALTHY, Action.RESET_GPU)
REBOOT = (Level.UNHEALTHY, Action.REBOOT_NODE)


def evaluator(seen: Iterable[Observation], branch: int | None = 575) -> Evaluator:
    made = Evaluator(POLICY, branch)
    for each in seen:
        made.add(each)
    return made


def standing(
    seen: Iterable[Observation], now_s: float, branch: int | None = 575
) -> tuple[HealthFinding, ...]:
    return evaluator(seen, branch).findings(now_s)


def said(seen: Iterable[Observation], now_s: float, branch: int | None = 575) -> tuple[Level, Action]:
    for verdict in evaluator(seen, branch).verdicts(now_s):
        if verdict.entity == GPU:
            return verdict.level, verdict.action
    return Level.HEALTHY, Action.NONE


def of(code: int, seen: Iterable[Observation], now_s: float, branch: int | None = 575) -> Said:
    """Return the level and action of the finding with this code."""
    for each in standing(seen, now_s, branch):
        if each.code == code:
            return each.level, each.action
    return Level.HEALTHY, Action.NONE

"""Builds an agent from the command line: policy, saved state, clock, and sensors with their positions."""

from __future__ import annotations

import argparse
import errno
import shutil
import threading
from collections.abc import Callable, Container, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from holdfast.errors import BadInput
from holdfast.version import __version__
from nodeagent.agent import claim, saved_state
from nodeagent.agent.claim import Claim, FolderInUse
from nodeagent.agent.policy_file import PolicyFile
from nodeagent.agent.saved_state import SavedState
from nodeagent.agent.sensor_threads import FittedSensor
from nodeagent.cli import identity
from nodeagent.cli.disk_calls import DiskCall, NoAnswer
from nodeagent.cli.options import POLICY_FILE
from nodeagent.host.sensor import HostSensor
from nodeagent.host.stuck_threads import StuckThreads
from nodeagent.kernel.kmsg import KmsgCursor, KmsgSensor
from nodeagent.kernel.line_reader import LinePatterns
from nodeagent.model import Level
from nodeagent.nvml import library
from nodeagent.nvml.driver import NvmlDriver
from nodeagent.nvml.events import NvmlEvents
from nodeagent.nvml.polling import NvmlPolling
from nodeagent.policy import kernel_lines, loading
from nodeagent.policy.rules import HealthPolicy, Rule, RuleKind
from nodeagent.policy.validation import BadPolicy
from nodeagent.sensing import clock as clocks
from nodeagent.sensing.baselines import ForgetRequests
from nodeagent.sensing.clock import Clock
from nodeagent.sensing.operator_requests import OperatorRequests
from nodeagent.sysfs.infiniband import ExpectedPorts
from nodeagent.sysfs.sensor import SysfsSensor

QUICK = (0.2, 5.0)  # seconds between two readings in a short run: minimum and maximum
READINGS = 3  # how often a short run reads each counter; a rate needs two readings

# How long startup waits for disks that do not answer: first for the saved state, including a takeover from an
# owner that does not answer; then for the policy file; then for the policy file without the disk that hangs;
# and last for the host's machine id.
READ_S = 5.0
STATE_S = claim.ANSWER_S + READ_S
POLICY_S = 2.5
MACHINE_ID_S = 2.0
DISK_S = STATE_S + 2 * POLICY_S + MACHINE_ID_S  # at most, all together

# These errors indicate a bad disk, not a configuration mistake. The agent starts anyway, because it may be
# needed most at that moment.
_DISK = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS),
    *(errno.EUCLEAN, errno.EBADMSG),  # the file system or its checksums are damaged
    *(errno.ENODEV, errno.ENXIO, errno.ESTALE),  # the device or the server of the file system is gone
)


@dataclass(slots=True)
class AgentParts:
    """The parts of an agent."""

    policy: HealthPolicy
    clock: Clock
    state: SavedState
    folder: Path | None  # the folder for the saved state; None: read-only
    claim: Claim | None  # the claim on that folder; None: read-only, or the disk has not permitted it yet
    problems: tuple[str, ...]
    sensors: list[FittedSensor]
    branch: Callable[[], int | None]
    lines: LinePatterns
    requests: OperatorRequests
    identity: Mapping[str, str]
    test: bool
    disk_answers: threading.Event | None  # None unless the disk hung at startup; set when it answers
    policy_file: PolicyFile | None = None  # None: the policy does not change while the agent runs
    lost: str = ""  # why this process, which saves the state, starts without it; "" if it has it
    # Returns what the disk that hung has answered: the saved state, its claim and why a part of it is lost.
    # Raises BadInput or OSError if the disk has returned an error. None unless the disk hung.
    answer: Callable[[], LoadedState] | None = None

    def about(self) -> dict[str, Any]:
        """Return the part of the report that stays constant while the agent runs."""
        return {
            **self.identity,
            "boot_id": self.clock.anchor.boot_id,
            "booted_s": round(self.clock.anchor.offset_s, 3),
            "version": __version__,
            "policy": (self.policy_file.current if self.policy_file else self).policy.version,
            "test": self.test,
        }


def assemble(
    options: argparse.Namespace, *, keeps: bool, trusting: bool = False, quick_s: float | None = None
) -> AgentParts:
    """Return the parts of the agent that `options` describes.

    Args:
        options: The options of `check`, `watch` or `serve`.
        keeps: True if this process saves the state; otherwise it only reads it.
        trusting: True to accept kernel lines from user space, for tests.
        quick_s: The duration of a short run; None for an indefinite one. In a short run, counters are read
            often enough for a rate, and a single sample with fewer GPUs or InfiniBand ports than `options`
            requires is a finding.

    Raises:
        BadInput: the policy (unless `keeps`) or the folder of the saved state cannot be used. The message has
            one line for each mistake.
    """
    loaded = _load(options, keeps)
    state, policy_file, hangs = loaded.state, loaded.policy_file, loaded.hung is not None
    chosen = load_policy(options.policy) if policy_file is None else policy_file.current.policy
    if quick_s is not None:
        promised = {"gpu_count": options.gpus, "ib_port_count": options.ib_ports}
        chosen = policy_for_short_look(
            chosen, quick_s, promised={each for each, count in promised.items() if count is not None}
        )
    clock = clocks.begin(state.anchor, state.last_s)
    driver = NvmlDriver(options.sys)
    lines = LinePatterns(
        kernel_lines.load_lines((loading.FOLDER / kernel_lines.FILE).read_text(encoding="utf-8"))
    )
    requests = OperatorRequests(
        options.state_dir, clock, state.positions.get(OperatorRequests.name), acknowledges=keeps
    )
    if not hangs:
        requests.read_ahead()
    sensors = [
        *_sensors(options, chosen, clock, state, driver, lines, trusting, requests.forgets),
        FittedSensor(requests, requests.position, requests.left_out, reads_state=True),
    ]
    if quick_s is not None:
        for each in sensors:
            each.sensor.period_s = min(each.sensor.period_s, _pause_s(quick_s))
    if policy_file is not None:
        sensors.append(FittedSensor(policy_file, reads_state=True))
    folder = options.state_dir if keeps and not hangs else None
    return AgentParts(
        chosen, clock, state, folder, loaded.claim, loaded.problems, sensors, lambda: driver.branch, lines,
        requests, _identity(options), trusting,
        None if loaded.hung is None else loaded.hung.ended, policy_file, loaded.lost if keeps else "",
        loaded.answer,
    )  # fmt: skip


def _identity(options: argparse.Namespace) -> Mapping[str, str]:
    machine_id = ""
    with suppress(NoAnswer):
        machine_id = DiskCall(lambda: identity.read_machine_id(options.root)).result(MACHINE_ID_S)
    return identity.of_node(options.node_name, options.provider_id, machine_id)


def policy_for_short_look(chosen: HealthPolicy, look_s: float, *, promised: Container[str]) -> HealthPolicy:
    """Return the policy for a run of `look_s`: some checks are read more often, and limits stay the same.

    These are the counters, to see their growth, and the checks of stuck processes, because a process that is
    asleep at only one look may not be stuck.
    One sample is enough for a finding of the `promised` checks, whose number an operator has given.
    """
    rules = dict(chosen.rules)
    for name, rule in chosen.rules.items():
        if rule.period_s and (rule.kind is RuleKind.RATE or name in StuckThreads.checks):
            rules[name] = replace(rule, period_s=min(rule.period_s, _pause_s(look_s)))
        if name in promised:
            rules[name] = _at_once(rule)
    if "gpu_count" in promised:
        rules["nvml"] = _without_library(rules["nvml"])
    return replace(chosen, rules=rules)


def _at_once(rule: Rule) -> Rule:
    bound = rule.unhealthy and replace(rule.unhealthy, need=1, of=1)
    states = {value: replace(state, for_s=0.0) for value, state in rule.states.items()}
    return replace(rule, unhealthy=bound, states=states)


def _without_library(rule: Rule) -> Rule:
    """Return the rule for a node on which GPUs are promised: without the library, they cannot be used.

    The policy calls the missing library degraded, because without a promise only the agent may lack it.
    """
    state = rule.states.get(library.LIBRARY_MISSING)
    if state is None or state.level is Level.HEALTHY:  # the operator's word
        return rule
    return replace(
        rule,
        states={**rule.states, library.LIBRARY_MISSING: replace(state, level=Level.UNHEALTHY, for_s=0.0)},
    )


def _pause_s(look_s: float) -> float:
    return min(max(QUICK[0], look_s / READINGS), QUICK[1])


def load_policy(path: Path | None) -> HealthPolicy:
    """Return the policy with the operator's changes, if any.

    Raises BadInput if the file has mistakes, listing all of them, or if its disk does not answer.
    """
    try:
        return DiskCall(lambda: _read_policy(path)).result(READ_S)
    except NoAnswer:
        named = path or POLICY_FILE
        raise BadInput(
            f"--policy {named}: the disk has not answered for {READ_S:g} s, expected a TOML file"
        ) from None


def _read_policy(path: Path | None) -> HealthPolicy:
    if path is None and not POLICY_FILE.exists():
        return loading.load()
    path = path or POLICY_FILE
    try:
        return loading.load(loading.read_overrides(path), str(path))
    except BadPolicy as error:
        raise BadInput("\n".join(error.messages)) from None


@dataclass(frozen=True, slots=True)
class LoadedState:
    """What startup reads from the folder of the saved state."""

    state: SavedState
    claim: Claim | None
    problems: tuple[str, ...]
    policy_file: PolicyFile | None = None  # keeps a copy in the folder; None for a process that only reads
    hung: DiskCall[Any] | None = None  # the call that the folder's disk has not answered
    lost: str = ""  # why the state, or a part of it, is not there; "" if nothing is missing
    answer: Callable[[], LoadedState] | None = None  # as in `AgentParts`


def _load(options: argparse.Namespace, keeps: bool) -> LoadedState:
    reading = DiskCall(lambda: _saved_state(options.state_dir, keeps))
    within_s = STATE_S if keeps else READ_S
    try:
        loaded = reading.result(within_s)
    except NoAnswer:
        loaded = _without_the_disk(options, reading, within_s, lambda: reading.result(0.0))
    return _with_policy_file(loaded, options) if keeps else loaded


def _without_the_disk(
    options: argparse.Namespace, hung: DiskCall[Any], for_s: float, answer: Callable[[], LoadedState]
) -> LoadedState:
    why = f"{options.state_dir}: the disk has not answered for {for_s:g} s; nothing is loaded or saved"
    return LoadedState(SavedState(), None, (why,), hung=hung, lost=why, answer=answer)


def _with_policy_file(loaded: LoadedState, options: argparse.Namespace) -> LoadedState:
    """Add the policy file. If a disk does not answer, use what can be read, and read the file later."""

    def made(folder: Path | None, reads_now: bool = True) -> PolicyFile:
        path = options.policy or POLICY_FILE
        return PolicyFile(path, folder, required=options.policy is not None, reads_now=reads_now)

    folder = options.state_dir if loaded.hung is None else None
    with suppress(NoAnswer):
        return replace(loaded, policy_file=DiskCall(lambda: made(folder)).result(POLICY_S))
    if folder is not None:
        kept, alone = DiskCall(lambda: made(folder, False)), DiskCall(lambda: made(None))
        with suppress(NoAnswer):  # the policy file's disk hangs, but the saved state's disk does not
            return replace(loaded, policy_file=kept.result(POLICY_S))
        before = loaded
        loaded = _without_the_disk(options, kept, POLICY_S, lambda: before)
        with suppress(NoAnswer):
            return replace(loaded, policy_file=alone.result(0.0))
    return replace(loaded, policy_file=made(None, False))


def _saved_state(folder: Path, keeps: bool) -> LoadedState:
    claimed, problems = _claimed(folder) if keeps else (None, ())
    try:
        state, more = saved_state.load(folder, set_aside=keeps)
        return LoadedState(state, claimed, (*problems, *more), lost="; ".join(more))
    except OSError as error:
        if keeps and error.errno not in _DISK:
            raise _refused(folder, error) from None
        why = f"{folder}: {error.strerror}: the saved state is not used"
        return LoadedState(SavedState(), claimed, (*problems, why), lost=why)


def _claimed(folder: Path) -> tuple[Claim | None, tuple[str, ...]]:
    """Create and claim the folder; return a problem if the disk fails. Raises BadInput for other errors."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = claim.take(folder)
    except FolderInUse as error:
        raise BadInput(f"--state-dir {folder}: {error}; expected an unused folder") from None
    except OSError as error:
        if error.errno not in _DISK:
            raise _refused(folder, error) from None
        return None, (f"{folder}: {error.strerror}: nothing is saved until this is resolved",)
    if not found.took_over:
        return found, ()
    why = f"took over from process {found.took_over}, which does not answer and has not ended"
    return found, (f"{folder}: {why}",)


def _refused(folder: Path, error: OSError) -> BadInput:
    return BadInput(f"--state-dir {folder}: {error.strerror}, expected a writable folder")


def _sensors(
    options: argparse.Namespace,
    chosen: HealthPolicy,
    clock: Clock,
    state: SavedState,
    driver: NvmlDriver,
    lines: LinePatterns,
    trusting: bool,
    forgets: ForgetRequests,
) -> list[FittedSensor]:
    periods_s = {name: rule.period_s for name, rule in chosen.rules.items() if rule.period_s}
    before = state.positions
    promised = options.command == "check" and options.gpus is not None
    expected = ExpectedPorts(options.ib_ports, options.ib_gbps)
    polling = NvmlPolling(
        driver, clock, periods_s, _mapping(before, NvmlPolling.name), options.gpus, promised,
        forgets,
    )  # fmt: skip
    host = HostSensor(
        clock, periods_s, _mapping(before, HostSensor.name), options.proc, options.root, options.sys
    )
    sysfs = SysfsSensor(clock, periods_s, _mapping(before, SysfsSensor.name), options.sys, expected, forgets)
    events = NvmlEvents(driver, clock)
    return [
        FittedSensor(events, left_out=events.left_out, releases=True, sees_xids=True),
        FittedSensor(polling, polling.remembered, polling.left_out, releases=True),
        *_kernel_log(options, clock, state, lines, trusting),
        FittedSensor(host, host.remembered, host.left_out),
        FittedSensor(sysfs, sysfs.remembered, sysfs.left_out),
    ]


def _kernel_log(
    options: argparse.Namespace, clock: Clock, state: SavedState, lines: LinePatterns, trusting: bool
) -> list[FittedSensor]:
    how = options.kernel_log
    if how in ("auto", "kmsg") and (how == "kmsg" or _opens(options.kmsg) or not _has_journal(options)):
        at = _cursor(state.positions.get(KmsgSensor.name))
        return [_kmsg(KmsgSensor(clock, lines, at, path=options.kmsg, trust_user_lines=trusting))]
    return [_journal(options, clock, state, lines, trusting)] if how in ("auto", "journal") else []


def _kmsg(sensor: KmsgSensor) -> FittedSensor:
    def read_to() -> Any:
        at = sensor.cursor
        return None if at is None else [at.boot_id, at.seq]

    return FittedSensor(sensor, read_to, sensor.left_out, sees_xids=True)


# The journal's sensor is imported only where it may be used; an agent that reads /dev/kmsg stays smaller.


def _has_journal(options: argparse.Namespace) -> bool:
    from nodeagent.kernel.journal import JOURNALCTL

    return options.journal_dir is not None or shutil.which(JOURNALCTL) is not None


def _journal(
    options: argparse.Namespace, clock: Clock, state: SavedState, lines: LinePatterns, trusting: bool
) -> FittedSensor:
    from nodeagent.kernel.journal import JournalSensor

    text = state.positions.get(JournalSensor.name)
    journal = JournalSensor(
        clock,
        lines,
        text if isinstance(text, str) else "",
        directory=options.journal_dir,
        trust_user_lines=trusting,
    )
    return FittedSensor(journal, lambda: journal.cursor, sees_xids=True)


def _opens(path: Path) -> bool:
    try:
        with path.open("rb", buffering=0):
            return True
    except OSError:
        return False


def _mapping(positions: dict[str, Any], name: str) -> dict[str, Any] | None:
    found = positions.get(name)
    return found if isinstance(found, dict) else None


def _cursor(raw: Any) -> KmsgCursor | None:
    if isinstance(raw, list) and len(raw) == 2 and isinstance(raw[0], str) and type(raw[1]) is int:
        return KmsgCursor(raw[0], raw[1])
    return None

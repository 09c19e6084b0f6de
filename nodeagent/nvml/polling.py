"""The sensor that polls NVML for the state of the driver and every GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from nodeagent import model
from nodeagent.model import Observation
from nodeagent.nvml import gpu_checks, gpu_roster, inventory, library
from nodeagent.nvml.driver import NvmlDriver, NvmlSession
from nodeagent.nvml.gpu_checks import recovery_action
from nodeagent.nvml.gpu_query import GpuGone, GpuQuery, GpuReading
from nodeagent.nvml.gpu_roster import STATE_OF_GONE, GpuHistory, GpuRoster
from nodeagent.nvml.library import DriverGone
from nodeagent.sensing.baselines import ForgetRequests, ForgottenBaselines
from nodeagent.sensing.clock import Clock
from nodeagent.sensing.progress import CallProgress
from nodeagent.sensing.sensor import Omission, Unavailable
from nodeagent.sensing.sweep import Periods

ProbeRead = Callable[[GpuQuery, GpuHistory], Iterable[GpuReading]]
EARLY_S = 1.0  # a sweep that is this early is treated as on time
# How often to initialise NVML again while a GPU is missing. NVML looks for GPUs only during initialisation.
RENEW_S = 60.0
# How often the modes of each GPU are read. They are also read when `nvlink_down`, a falling counter or a sign
# of a reset depends on them.
MODES, MODES_S = "modes", 300.0
UNSEEN_RESET = "NVML answered that the GPU needs a reset; the GPU works again, but no reset was seen"


_entity = lru_cache(maxsize=inventory.MAX_GPUS)(model.gpu_entity)


@dataclass(frozen=True, slots=True)
class Probe:
    """Reads the values of one or more checks with the same NVML calls."""

    checks: frozenset[str]
    read: ProbeRead


def _alone(read: Callable[[GpuQuery], Iterator[GpuReading]], *checks: str) -> Probe:
    return Probe(frozenset(checks), lambda query, _history: read(query))


def _nvlink_down(query: GpuQuery, known: GpuHistory) -> Iterator[GpuReading]:
    up_now = gpu_checks.links_up(query, known.links)
    if known.links != {link for link, up in up_now.items() if up}:
        known.take_mig(gpu_checks.mig_mode(query))  # a changed mode may explain the difference
    yield from gpu_checks.nvlink_down(up_now, known.links, known.mig)


PROBES = (
    _alone(recovery_action, "recovery_action"),
    _alone(gpu_checks.uncorrected_errors, "ecc_dbe"),
    _alone(gpu_checks.corrected_errors, "ecc_sbe"),
    _alone(gpu_checks.sram_threshold, "ecc_sram_threshold"),
    _alone(gpu_checks.remapped_rows, "row_remap_pending", "row_remap_failure"),
    _alone(gpu_checks.retired_pages, "retired_pages", "retired_pages_pending"),
    _alone(gpu_checks.inforom, "inforom"),
    _alone(gpu_checks.temperature_margin, "gpu_temperature_margin"),
    _alone(gpu_checks.throttled, "gpu_throttled"),
    _alone(gpu_checks.pcie_link, "pcie_link"),
    _alone(gpu_checks.pcie_generation, "pcie_generation"),
    _alone(gpu_checks.pcie_replays, "pcie_replay"),
    Probe(frozenset({"nvlink_down"}), _nvlink_down),
    Probe(
        frozenset({"nvlink_errors"}),
        lambda query, history: gpu_checks.nvlink_errors(query, history.nvlink_total),
    ),
    _alone(gpu_checks.fabric, "fabric"),
)
# Every check that `NvmlPolling` can sample.
CHECKS = frozenset({"nvml", "gpu_state", "gpu_count"}).union(*(probe.checks for probe in PROBES))


@lru_cache(maxsize=32)  # the same for all GPUs of a sweep
def _due_probes(due: frozenset[str]) -> tuple[Probe, ...]:
    return tuple(probe for probe in PROBES if probe.checks & due)


def sweep_gpu(
    query: GpuQuery | None,
    known: GpuHistory,
    due: frozenset[str],
    absent: tuple[int, str],
    session: NvmlSession,
    last_query: GpuQuery | None = None,
) -> Iterator[GpuReading]:
    """Yield the due readings of one GPU, then its state, and a `gpu_reset` if it was reset.

    Args:
        query: None if NVML cannot open the GPU.
        known: The GPU's history, which is updated.
        absent: The state to report, and the reason, if `query` is None.
        session: The session of NVML that `query` belongs to.
        last_query: The last one in this session, even if NVML can no longer open the GPU.

    Raises:
        DriverGone.
    """
    before, is_unproven = known.state, False
    reasons: list[str] = []
    if query is None:
        state, why = absent
    else:
        query.begin()
        try:
            yield from _values(query, known, due, reasons, session)
            state, why = _state(query, before)
            is_unproven = (
                state == gpu_roster.OK and known.required and not _keeps_state(query, known, session)
            )
        except GpuGone as gone:
            state, why = STATE_OF_GONE[gone.code], str(gone)
    if known.take_state(state, present=query is not None) and not is_unproven:
        reasons.append("the GPU is back")
    if query is not None or state != gpu_roster.OK:
        mode = _mode_of_broken(last_query) if state == gpu_roster.RESET_REQUIRED else None
        known.take_required(state, session.number, mode)
    if "gpu_state" in due or state != before:
        yield GpuReading("gpu_state", state, why)
    if is_unproven:
        yield GpuReading("gpu_unavailable", 0.0, UNSEEN_RESET)
    if reasons:
        yield GpuReading("gpu_reset", 0.0, "; ".join(reasons))


def _values(
    query: GpuQuery, known: GpuHistory, due: frozenset[str], reasons: list[str], session: NvmlSession
) -> Iterator[GpuReading]:
    if MODES in due:
        known.take_persistence(gpu_checks.persistence_mode(query), session.number)
        known.take_mig(gpu_checks.mig_mode(query))
    for probe in _due_probes(due):
        for reading in probe.read(query, known):
            if sign := _sign_of_reset(reading, query, known, session):
                reasons.append(sign)
            if reading.check in due:
                yield reading


def _sign_of_reset(reading: GpuReading, query: GpuQuery, known: GpuHistory, session: NvmlSession) -> str:
    """Record a reading. If it shows that the GPU was reset, return how; otherwise return ""."""
    if reading.check == "ecc_dbe":
        fell = known.take_uncorrected(reading.value, session.number)
        if fell and _keeps_counters(query, known):
            return "its volatile counter of uncorrected errors restarted from zero"
    elif reading.check == "recovery_action" and _request_was_met(int(reading.value), query, known, session):
        return "the driver no longer requests a reset"
    return ""


def _request_was_met(action: int, query: GpuQuery, known: GpuHistory, session: NvmlSession) -> bool:
    """Record the recovery action; return True if the driver has taken back its request because of a reset.

    Between two sessions of NVML (a restart of the agent, a release, a renewal), the driver forgets the
    request when the last program closes the GPU, unless persistence mode is on. So a request that ends there
    shows a reset only if the mode was on when the request was last read, and is on now.
    """
    same_session, before = known.recovery_in == session.number, known.recovery
    done, known.recovery_in = known.take_recovery(action), session.number
    if known.requests_reset and not (same_session and action == before):
        known.request_kept = gpu_checks.persistence_mode(query) is True
    return done and (same_session or (known.request_kept and gpu_checks.persistence_mode(query) is True))


def _mode_of_broken(query: GpuQuery | None) -> bool | None:
    """Return the persistence mode of a GPU that needs a reset; None if NVML does not tell it.

    The mode as last read may be minutes old, so it does not show what the driver forgets from now on.
    """
    try:
        return None if query is None else gpu_checks.persistence_mode(query)
    except (GpuGone, DriverGone):  # a lost driver shows with the next call, once the state has been recorded
        return None


def _keeps_state(query: GpuQuery, known: GpuHistory, session: NvmlSession) -> bool:
    """Return True if the driver cannot have forgotten that the GPU needs a reset: see `_request_was_met`."""
    if known.required_in == session.number:
        return True
    return known.required_kept and gpu_checks.persistence_mode(query) is True


def _keeps_counters(query: GpuQuery, known: GpuHistory) -> bool:
    """Return True if persistence mode was on at the last reading and is still on.

    Without it, the driver forgets a GPU's counters when the last program closes the GPU. That may be the
    agent itself, when it initialises NVML again to search for a missing GPU.
    """
    before, known.persistence = known.persistence, gpu_checks.persistence_mode(query)
    return before is True and known.persistence is True


def _state(query: GpuQuery, before: int) -> tuple[int, str]:
    if query.answered:
        return gpu_roster.OK, ""
    if query.failed:
        return gpu_roster.UNREADABLE, query.failed
    return before, ""  # no call was made


class NvmlPolling:
    """Reports every check of `CHECKS` that has a period; see `sensor.Sensor`.

    The sensor keeps working while the driver is unloaded or replaced, and reports an unusable driver.
    """

    name = "nvml-polling"
    period_s = 5.0

    def __init__(
        self,
        driver: NvmlDriver,
        clock: Clock,
        periods_s: Mapping[str, float],
        remembered: Mapping[str, Any] | None = None,
        expected: int | None = None,
        promised: bool = False,
        forgets: ForgetRequests | None = None,
    ) -> None:
        """Create the sensor; nothing is opened yet.

        Args:
            periods_s: The period of each check, as in `policy/checks.toml`; checks of other sensors are
                ignored.
            remembered: The result of `remembered` before a restart; the sensor continues from it.
            expected: How many GPUs the node has; by default, the highest number ever seen.
            promised: True to report the GPUs as missing while the driver is unusable, because an operator has
                set their number. Without the library, it is not known how many are missing.
            forgets: Operators' requests to forget baselines; None for none.
        """
        self._driver = driver
        self._clock = clock
        self.progress = CallProgress()
        # A step may be half a period early.
        self._periods = Periods({**periods_s, MODES: MODES_S}, CHECKS | {MODES}, 2 * EARLY_S)
        history = gpu_roster.load_history(remembered)
        if (remembered or {}).get("boot", clock.anchor.boot_id) != clock.anchor.boot_id:
            history.end_requirements()
        self._roster = GpuRoster(history, expected, self.progress)
        self._promised = promised
        self._session: NvmlSession | None = None
        self._unread: DriverGone | None = None  # why the last read could not evaluate the GPUs
        self._begun_s = 0.0
        self._began = 0  # the number of the session that the roster's GPUs belong to
        self._forgotten = ForgottenBaselines(forgets, (remembered or {}).get("forgets_done"))
        self._remembered = self._dump()

    def open(self) -> None:
        """Join NVML if possible. Raises Unavailable only if the node has nothing to poll."""
        try:
            self._session = self._join()
        except DriverGone as gone:
            self._unless_no_gpus(gone)

    def read(self) -> list[Observation]:
        seen: list[Observation] = []
        for request in self._forgotten.take():
            self._roster.forget(request)
        try:
            for each in self._sweep():
                seen.append(each)  # noqa: PERF402  # readings before an exception are kept
            self._unread = None
        except DriverGone as gone:
            if self._session is not None:
                self._driver.lose(self._session, gone)
            self.close()
            self._unless_no_gpus(gone)
            seen.append(self._observe("nvml", model.DRIVER, gone.state, text=str(gone)))
            self._unread = gone
            if self._promised and gone.state != library.LIBRARY_MISSING:
                text = f"0 of {self._roster.expected} GPUs: {gone}"
                seen.append(self._observe("gpu_count", model.NODE, self._roster.expected, text=text))
        self._remembered = self._dump()
        return seen

    def _dump(self) -> dict[str, Any]:
        done, boot = self._forgotten.position(), self._clock.anchor.boot_id
        return {**self._roster.history.dump(), "forgets_done": done, "boot": boot}

    def close(self) -> None:
        self._session = None
        self.progress.mark("nvmlShutdown")
        self._driver.leave(self.name)

    def _join(self) -> NvmlSession:
        self.progress.mark("nvmlInit")
        return self._driver.join(self.name)

    def remembered(self) -> dict[str, Any]:
        """Return the state for the next `NvmlPolling`, as JSON. May be called from any thread."""
        return self._remembered

    def left_out(self) -> tuple[Omission, ...]:
        """Return the GPUs that the last read could not evaluate. May be called from any thread."""
        if self._unread is None:
            return ()
        expected = self._roster.expected
        which = f"none of the {expected} expected GPUs" if expected else "no GPU"
        return (Omission("gpu_state", f"{which} could be evaluated: {self._unread}", is_open=True),)

    def _unless_no_gpus(self, gone: DriverGone) -> None:
        if not self._roster.expected and not inventory.gpus_on_bus(self._driver.sysfs):
            raise Unavailable(
                f"no NVIDIA driver, and no NVIDIA GPU on the PCI bus ({gone})", nothing_there=True
            ) from None

    def _sweep(self) -> Iterator[Observation]:
        if self._session is None or not self._driver.usable(self._session):
            self._session = self._join()
        session = self._session
        due = self._periods.due(self._clock.now_s())
        if session.number != self._began:
            yield from self._begin(session)
        elif due & {"gpu_state", "gpu_count"}:
            yield from self._query(again=not self._roster.all_well)
        if "nvml" in due:
            versions = (("driver", session.driver), ("nvml", session.nvml))
            yield self._observe("nvml", model.DRIVER, library.OK, facts=versions)
        if "gpu_count" in due:
            missing, text = self._roster.missing()
            yield self._observe("gpu_count", model.NODE, missing, text=text)
        for pci in tuple(self._roster.history.gpus):
            yield from self._gpu(pci, due, session)
        now_s = self._clock.now_s()
        if self._roster.any_absent and now_s - self._begun_s >= RENEW_S:
            self._begun_s = now_s
            self._driver.renew(session)
            self.close()  # NVML can be initialised again only after all sensors have left

    def _begin(self, session: NvmlSession) -> Iterator[Observation]:
        self._begun_s = self._clock.now_s()
        self._roster.void()
        yield from self._query(again=True)
        if self._roster.history.reloaded(session.load, session.after_loss):
            for pci in self._roster.listed:
                yield self._observe("gpu_reset", model.gpu_entity(pci), 0.0, text="the driver was reloaded")
        self._began = session.number

    def _query(self, again: bool) -> Iterator[Observation]:
        listed = inventory.count_gpus(self.progress)
        if again or listed != self._roster.count:
            bus = inventory.gpu_bus(self._driver.sysfs, self._driver.devices)
            for pci, old, new in self._roster.update(inventory.list_gpus(self.progress), bus):
                text = f"{new} in place of {old}"
                yield self._observe("replaced", model.gpu_entity(pci), 0.0, text=text)

    def _gpu(self, pci: str, due: frozenset[str], session: NvmlSession) -> Iterator[Observation]:
        known = self._roster.history.gpus[pci]
        entity = _entity(pci)
        query: GpuQuery | None = self._roster.queries.get(pci)
        if known.state in gpu_roster.ABSENT and "gpu_state" not in due:
            return  # a missing GPU may take a long time to respond
        absent = self._roster.absent.get(pci, (gpu_roster.VANISHED, "NVML no longer lists it"))
        for reading in sweep_gpu(query, known, due, absent, session, self._roster.last_queries.get(pci)):
            known_facts = self._roster.facts(pci) if reading.check == "gpu_state" else reading.facts
            yield self._observe(reading.check, entity, reading.value, reading.text, known_facts)

    def _observe(
        self, check: str, entity: str, value: float, text: str = "", facts: tuple[tuple[str, str], ...] = ()
    ) -> Observation:
        return Observation(
            self._clock.now_s(), check, entity, self.name, float(value), text=text, facts=facts
        )

"""One GPU, asked for all that is due: its values, its state, and whether it was reset meanwhile."""

from __future__ import annotations

from collections.abc import Iterator

from nodeagent.nvml import history, library
from nodeagent.nvml.asking import Asker, GpuGone, Reading
from nodeagent.nvml.history import GpuHistory
from nodeagent.nvml.probes import PROBES

_GONE = {
    library.GPU_IS_LOST: history.LOST,
    library.RESET_REQUIRED: history.RESET_REQUIRED,
    library.GPU_NOT_FOUND: history.VANISHED,
}


def state_of(code: int) -> int:
    """Return the value of the check `gpu_state` for what NVML answered when asked for the GPU."""
    absent = (library.NOT_FOUND, library.INVALID_ARGUMENT)
    return history.VANISHED if code in absent else _GONE.get(code, history.UNREADABLE)


def sweep_gpu(
    asker: Asker | None, known: GpuHistory, due: frozenset[str], away: tuple[int, str]
) -> Iterator[Reading]:
    """Tell what is due of one GPU, then its state, and a `gpu_reset` if it was reset.

    Args:
        asker: None if NVML does not open the GPU: then `away` is its state and why.
        known: What is known of it, brought up to date.

    Raises:
        DriverGone.
    """
    before = known.state
    reasons: list[str] = []
    if asker is None:
        state, why = away
    else:
        asker.begin()
        try:
            yield from _values(asker, known, due, reasons)
            state, why = _state(asker, before)
        except GpuGone as gone:
            state, why = _GONE[gone.code], str(gone)
    if known.take_state(state):
        reasons.append("it is back")
    if "gpu_state" in due or state != before:
        yield Reading("gpu_state", state, why)
    if reasons:
        yield Reading("gpu_reset", 0.0, "; ".join(reasons))


def _values(asker: Asker, known: GpuHistory, due: frozenset[str], reasons: list[str]) -> Iterator[Reading]:
    for probe in PROBES:
        if not probe.checks & due:
            continue
        for reading in probe.read(asker, known):
            if reading.check == "ecc_dbe" and known.take_uncorrected(reading.value):
                reasons.append("its volatile counter of uncorrected errors restarted from zero")
            if reading.check == "recovery_action" and known.take_recovery(int(reading.value)):
                reasons.append("the driver asks for no reset any more")
            if reading.check in due:
                yield reading


def _state(asker: Asker, before: int) -> tuple[int, str]:
    if asker.answered:
        return history.OK, ""
    if asker.failed:
        return history.UNREADABLE, asker.failed
    return before, ""  # nothing was asked

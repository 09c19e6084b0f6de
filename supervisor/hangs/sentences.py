"""Write the user-facing messages about a group that completes no steps. Pure."""

from __future__ import annotations

from holdfast.protocol.progress import PhaseKind, meaning_of, words_of
from supervisor.hangs import evidence, group_reports
from supervisor.hangs.verdict import UNBEGUN, StallVerdict
from supervisor.view import reports
from supervisor.view.model import LateRank, Policy, View

_NAMED = 4  # how many ranks one line lists


def warning(view: View, found: StallVerdict) -> str:
    """Return the warning that precedes any action.

    It states the rank, the place, the duration and the user's options.
    """
    waited_s = (view.now_ns - view.watch.since_ns) / 1e9
    if found.place == UNBEGUN:
        return _warning_unbegun(found, waited_s)
    if found.limit_s is None:
        why = f"{found.why}, so it is left alone"
        return f"{why}: no step for {waited_s:.0f} s. --hang-floor TIME would restart it"
    others = sorted(each.rank for each in view.watch.ranks if each.rank != found.rank)
    waiting = f" while rank {others[0]} waits" if found.rank >= 0 and others else ""
    return (
        f"{found.why}: no step for {waited_s:.0f} s{waiting};"
        f" Holdfast restarts it at {found.limit_s or 0.0:.0f} s."
        ' If this is intended, use `with state.pause("eval", limit_s=...)` or a larger --stall-limit'
    )


def _warning_unbegun(found: StallVerdict, waited_s: float) -> str:
    observed = f"{found.why}: no step of a torch.optim optimizer for {waited_s:.0f} s"
    if found.limit_s is None:
        return (
            f"{observed}. Holdfast sees no other progress of a script that does not join, and leaves it alone"
        )
    return (
        f"{observed}; Holdfast restarts it at {found.limit_s:.0f} s (--first-step-timeout) unless it shows"
        " signs of work. If the script does no such steps, or waits long before the first, use a larger"
        " --first-step-timeout"
    )


def describe_in_time(view: View, policy: Policy, rank: int, phase: str) -> str:
    """Describe what a rank is doing while it is within its limit, and name the option that sets the limit."""
    until = f"which may take until --first-step-timeout ({policy.first_step_s:g} s)"
    state, meaning = group_reports.state(view, rank), meaning_of(phase)
    if phase and state is not None and reports.script_keeps_own_state(view) and not state.marks.first_step_ns:
        return f"rank {rank} has completed no optimizer step yet{_at(view, rank)}, {until}"
    if meaning is not None and meaning.kind is PhaseKind.START:
        return f"rank {rank} is {meaning.doing}{_at(view, rank)}, {until}"
    if not phase or state is None:
        return f"rank {rank} is starting, {until}"
    if not state.marks.first_step_ns:
        return f"rank {rank} is in its first step{_at(view, rank)}, {until}"
    return f"rank {rank} is in the {phase} phase of its own step{_at(view, rank)}, and is not late yet"


def describe_pause(view: View, rank: int, phase: str) -> str:
    """Describe what a rank is doing during a pause or a copy of its state, within the limit."""
    meaning = meaning_of(phase)
    if meaning is None or meaning.kind is PhaseKind.COPY:
        return f"rank {rank} is copying its state for Holdfast"
    until = "the limit of the pause (limit_s, or --pause-timeout)"
    return f"rank {rank} is in {meaning.doing} that the script declared{_at(view, rank)}, until {until}"


def _at(view: View, rank: int) -> str:
    position = next((each.where for each in reports.all_inspections(view) if each.rank == rank), "")
    return f", in {position}" if position else ""


def describe_standstill(view: View, named: LateRank, is_unknown: bool) -> str:
    """Describe which rank holds up the group, and where. If `is_unknown` is true, describe all candidates."""
    if is_unknown or named.rank < 0:
        scattered = _describe_scattered(view)
        if scattered:
            return scattered
        ranks = ", ".join(str(each.rank) for each in view.watch.ranks)
        return f"ranks {ranks} make no progress after step {named.step}, and no evidence singles one out"
    return f"rank {named.rank} has been {describe_late_rank(view, named)} since step {named.step}"


def _describe_scattered(view: View) -> str:
    """Describe where the ranks wait if all are in collectives, at different places; otherwise return "".

    Different places alone do not prove that the ranks will never meet. One rank may have its result while the
    result of another is still in transit, and process groups cannot be distinguished from outside. The proof
    requires that nothing is in transit (`supervisor.hangs.deadlock`).
    """
    places = {each.rank: group_reports.position(view, each) for each in view.watch.ranks}
    if len(set(places.values())) < 2 or not all(each.role == evidence.WAITS for each in view.watch.ranks):
        return ""
    first = sorted(places)[:_NAMED]
    named = ", ".join(f"rank {rank} in {places[rank] or 'an unknown place'}" for rank in first)
    more = f" and {len(places) - _NAMED} more" if len(places) > _NAMED else ""
    return f"all ranks wait for each other in collectives at different places: {named}{more}"


def describe_late_rank(view: View, late: LateRank) -> str:
    """Describe where a rank is and what it waits for."""
    where = f"in {group_reports.position(view, late) or name_activity(view, late.rank, late.phase)}"
    if late.role in (evidence.WORKS, evidence.BUSY):
        return f"{where} ({late.work})"
    if late.work == evidence.SLEEP:
        return f"{where} (sleeping)"
    if late.work == evidence.LOCK and late.role == evidence.IDLE:
        return f"{where} (waiting for a lock, which may still be released)"
    return f"{where} (waiting for {late.work})" if late.work and late.work != evidence.UNKNOWN else where


def name_activity(view: View, rank: int, phase: str) -> str:
    """Return the label of the rank's current pause, or its phase in words."""
    return group_reports.pause_label(view, rank, phase) or words_of(phase)

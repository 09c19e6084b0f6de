"""Write the user-facing messages about a group that completes no steps. Pure."""

from __future__ import annotations

from holdfast.protocol.progress import PhaseKind, meaning_of, words_of
from supervisor.hangs import evidence, group_reports
from supervisor.hangs.verdict import UNBEGUN, StallVerdict
from supervisor.view import reports
from supervisor.view.model import LateRank, PastFault, Policy, View

_NAMED = 4  # how many ranks one line lists


def warning(view: View, found: StallVerdict) -> str:
    """Return the warning that precedes any action.

    It states the rank, the place, the duration and the user's options.
    """
    waited_s = (view.now_ns - view.watch.since_ns) / 1e9
    if found.first_step:
        return _warning_in_first_step(view, found, waited_s)
    if found.place == UNBEGUN:
        return _warning_unbegun(found, waited_s)
    if found.limit_s is None:
        why = f"{found.why}, so it is left alone"
        return f"{why}: no step for {waited_s:.0f} s. --hang-floor TIME would restart it"
    others = sorted(each.rank for each in view.watch.ranks if each.rank != found.rank)
    waiting = f" while rank {others[0]} waits" if found.rank >= 0 and others else ""
    latest = f", or by {found.latest_s:.0f} s if it shows more signs of work" if found.latest_s else ""
    return (
        f"{found.why}: no step for {waited_s:.0f} s{waiting};"
        f" Holdfast restarts it at {found.limit_s or 0.0:.0f} s{latest}."
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


def _warning_in_first_step(view: View, found: StallVerdict, waited_s: float) -> str:
    waiting = [
        f"rank {each.rank} waits in {group_reports.position(view, each) or 'an unknown place'}"
        for each in view.watch.ranks
        if each.role == evidence.WAITS and each.rank != found.rank
    ]
    others = f" while {', '.join(waiting[:_NAMED])}" if waiting and found.rank >= 0 else ""
    others += f" and {len(waiting) - _NAMED} more wait" if others and len(waiting) > _NAMED else ""
    is_begun = all(each.begun for each in view.watch.ranks)
    since = "the first step has taken" if is_begun else "no step of a torch.optim optimizer for"
    lasts = f"{found.why}: {since} {waited_s:.0f} s{others}"
    if found.fault is not None:
        return f"{lasts}; Holdfast restarts it at {found.limit_s or 0.0:.0f} s, unless it shows signs of work"
    return f"{lasts}; it may take until {found.limit_s or 0.0:.0f} s (--first-step-timeout)"


def past_hangs(view: View, named: LateRank) -> list[PastFault]:
    """Return the hangs of this rank in this step, at this place, that the group was restarted for."""
    place = group_reports.place(view, named)
    return [each for each in _hangs_in_step(view, named.rank, named.step) if place and each.place == place]


def describe_hang(view: View, rank: int, step: int) -> str:
    """Return "rank 1 hangs", or "rank 1 hangs again in step 37" if it already has."""
    subject = f"rank {rank} hangs" if rank >= 0 else "the group hangs"
    if not _hangs_in_step(view, rank, step):
        return subject
    return f"{subject} again in {reports.name_step(view, step)}"


def hangs_again(view: View, rank: int, step: int) -> bool:
    """True if the group was already restarted because this rank (-1: the whole group) hung in this step."""
    return bool(_hangs_in_step(view, rank, step))


def _hangs_in_step(view: View, rank: int, step: int) -> list[PastFault]:
    found = (each for each in view.memory.history if each.kind == "hang")
    return [each for each in found if (each.rank, each.step) == (rank, step)]


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
    doing = describe_late_rank(view, named)
    if hangs_again(view, named.rank, named.step):
        return f"{describe_hang(view, named.rank, named.step)}: it has been {doing}"
    return f"rank {named.rank} has been {doing} since step {named.step}"


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

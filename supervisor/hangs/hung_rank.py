"""Find the rank that hangs from the ranks' progress pages, processes and stacks at one instant. Pure.

If one rank of a group stops, all others wait for it in a collective. These victims all show the same
evidence; the culprit is the rank that differs. The criteria are applied in order of reliability, each only to
the ranks that the earlier criteria could not clear.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from holdfast.protocol.launcher_messages import RankInspection
from supervisor.view import reports
from supervisor.view.model import LateRank, View

_STOPPED = frozenset("T")  # not "t" (traced): the debugger may be Holdfast's own stack reader
_DEAD = frozenset("ZX")
_SPIN_S = 0.05  # a rank that uses less CPU time than this during the inspection does not spin
_SPIN_RATIO = 4.0

_THREAD = re.compile(r'^Thread\s+\S+(?:\s+\([^)]*\))?(?::?\s*"(?P<name>[^"]*)")?')
_FRAME = re.compile(r"^\s+(?P<function>.+?) \((?P<file>[^()]*?)(?::\d+)?\)\s*$")
_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+")
_NATIVE_WAIT = re.compile(r"gloo::|nccl|c10d::|ProcessGroup", re.IGNORECASE)

_EXCHANGE = ("holdfast/training/protection/private_exchange",)  # where Holdfast itself waits for another rank

# How certainly a stack shows that a victim waits. BACKWARD is not certain: a rank that is stuck in C++ code
# has the same Python frames as a rank that waits there for its peers' gradients.
NOT_WAITING, UNKNOWN, BACKWARD, COLLECTIVE = range(4)


@dataclass(frozen=True, slots=True)
class HangVerdict:
    """The rank that most likely holds up the others, and the criterion that shows it."""

    rank: int
    why: str
    outliers: tuple[int, ...]  # the ranks that the last applied criterion could not clear


@dataclass(frozen=True, slots=True)
class StackGroup:
    """Ranks whose stacks differ only in line numbers."""

    ranks: tuple[int, ...]
    stack: str  # the stack of the lowest rank


def name_rank(view: View, holding: list[LateRank]) -> LateRank:
    """Return the rank in `holding` that holds up the group. Its number is -1 if the evidence is unclear."""
    if len(holding) == 1:
        return holding[0]
    ranks = {each.rank for each in holding}
    inspected = tuple(each for each in reports.all_inspections(view) if each.rank in ranks)
    if len(inspected) < len(holding):
        return replace(holding[0], rank=-1)
    found = find_hung_rank(inspected)
    named = next(each for each in holding if each.rank == found.rank)
    return named if len(found.outliers) == 1 else replace(named, rank=-1)


def find_hung_rank(inspected: tuple[RankInspection, ...]) -> HangVerdict:
    """Return the rank that most likely holds up the others. Raises `ValueError` without inspections."""
    if not inspected:
        raise ValueError("no rank can be found without inspections")
    left = tuple(sorted(inspected, key=lambda each: each.rank))
    if len(left) == 1:
        return HangVerdict(left[0].rank, f"rank {left[0].rank} is the only candidate", (left[0].rank,))
    for criterion in (_gone, _stopped, _behind, _not_waiting, _odd_stack, _spinning, _asleep, _blocked):
        found, why = criterion(left)
        if len(found) == 1:
            return HangVerdict(found[0].rank, f"rank {found[0].rank} {why}", (found[0].rank,))
        if found and criterion in (_gone, _stopped):
            ranks = tuple(each.rank for each in found)
            return HangVerdict(ranks[0], f"rank {ranks[0]} {why}, like {_listed(ranks[1:])}", ranks)
        left = found or left
    ranks = tuple(each.rank for each in left)
    why = f"the evidence does not distinguish {_listed(ranks)}; rank {ranks[0]} is the lowest"
    return HangVerdict(ranks[0], why, ranks)


def group_stacks(inspected: tuple[RankInspection, ...]) -> tuple[StackGroup, ...]:
    """Return the ranks grouped by their stacks without line numbers. The smallest group comes first.

    The stack of a group is the stack of its lowest rank, including the line numbers.
    """
    groups: dict[str, list[RankInspection]] = {}
    for each in sorted(inspected, key=lambda each: each.rank):
        groups.setdefault(_normalised(each.stack), []).append(each)
    made = [StackGroup(tuple(each.rank for each in same), _shown(same[0].stack)) for same in groups.values()]
    return tuple(sorted(made, key=lambda group: (len(group.ranks), group.ranks)))


_Found = tuple[tuple[RankInspection, ...], str]


def _gone(left: tuple[RankInspection, ...]) -> _Found:
    return tuple(e for e in left if e.process_state[:1] in _DEAD), "is dead"


def _stopped(left: tuple[RankInspection, ...]) -> _Found:
    return tuple(e for e in left if e.process_state[:1] in _STOPPED), "is stopped (state T)"


def _behind(left: tuple[RankInspection, ...]) -> _Found:
    last = min(_place(e) for e in left)
    ahead = max(_place(e) for e in left)
    why = f"is furthest behind: step {last[0]} against {ahead[0]}"
    if last[0] == ahead[0]:
        why = f"is furthest behind within step {last[0]}: phase change {last[1]} against {ahead[1]}"
    return tuple(e for e in left if _place(e) == last), why


def _place(inspection: RankInspection) -> tuple[int, int, int]:
    return inspection.step, inspection.phase_seq, inspection.phase


def _not_waiting(left: tuple[RankInspection, ...]) -> _Found:
    levels = {e.rank: classify_wait(e.stack) for e in left}
    lowest = min(levels.values())
    found = tuple(e for e in left if levels[e.rank] == lowest)
    if lowest == UNKNOWN:
        return found, "has no readable stack while the others wait in a collective"
    where = _innermost(found[0].stack)
    at = f", but is in {where}" if where else ""
    return found, f"is not waiting in a collective, unlike the others{at}"


def _odd_stack(left: tuple[RankInspection, ...]) -> _Found:
    groups = group_stacks(left)
    if len(groups) < 2 or len(groups[0].ranks) == len(groups[1].ranks):
        return left, ""
    odd = groups[0].ranks
    return tuple(e for e in left if e.rank in odd), "has a different stack from the others"


def _spinning(left: tuple[RankInspection, ...]) -> _Found:
    by_cpu = sorted(left, key=lambda e: e.cpu_s)
    most, next_s = by_cpu[-1], by_cpu[-2].cpu_s
    if most.cpu_s < _SPIN_S or most.cpu_s < _SPIN_RATIO * next_s:
        return left, ""
    return (most,), f"spins ({most.cpu_s:.2f} s of CPU time) while the others sleep"


def _asleep(left: tuple[RankInspection, ...]) -> _Found:
    """Return a rank that sleeps while the others spin. On GPUs, the victims busy-wait for a kernel."""
    by_cpu = sorted(left, key=lambda e: e.cpu_s)
    least, next_s = by_cpu[0], by_cpu[1].cpu_s
    if len(left) < 3 or next_s < _SPIN_S or next_s < _SPIN_RATIO * least.cpu_s:
        return left, ""
    return (least,), f"sleeps ({least.cpu_s:.2f} s of CPU time) while the others spin"


def _blocked(left: tuple[RankInspection, ...]) -> _Found:
    found = tuple(e for e in left if e.process_state.startswith("D"))
    return found or left, "is blocked in the kernel (state D)"


def classify_wait(stack: str) -> int:
    """Return how certainly `stack` shows a wait for other ranks, from `NOT_WAITING` to `COLLECTIVE`.

    The innermost Python frame of the main thread decides. C++ code that it calls has no frames in the stack.
    """
    frames = _main_frames(stack)
    if not frames:
        return UNKNOWN
    native: list[str] = []
    for function, file in frames:
        if ".py" not in file and not file.startswith("<"):
            native.append(function)
            continue
        if (
            file.startswith(_EXCHANGE)
            or _waits_for_device(function, file)
            or "torch/distributed/" in file
            or "torch/nn/parallel/distributed" in file
        ):
            return COLLECTIVE
        if function.endswith("_engine_run_backward"):
            return BACKWARD
        break
    return COLLECTIVE if any(map(_NATIVE_WAIT.search, native)) else NOT_WAITING


def is_meeting_point(at: str) -> bool:
    """True if ranks meet in `at`, the innermost function of a rank that waits.

    A wait for a device does not count, because the device may be computing.
    """
    function, _, file = at.partition(" (")
    return (
        function.endswith("_engine_run_backward")
        or "torch/distributed/" in file
        or file.startswith(_EXCHANGE)
    )


def waits_for_device_at(at: str) -> bool:
    """True if a rank waits for its device in `at`, its innermost function."""
    function, _, file = at.partition(" (")
    return _waits_for_device(function, file)


def _waits_for_device(function: str, file: str) -> bool:
    """True if the function waits for a GPU's queue.

    Such a wait ends only when the collectives in the queue end.
    """
    return file.startswith("holdfast/state/device") or (
        "torch/cuda/" in file and function.endswith("synchronize")
    )


def _innermost(stack: str) -> str:
    frames = _main_frames(stack)
    return f"{frames[0][0]} ({frames[0][1]})" if frames else ""


def _main_frames(stack: str) -> tuple[tuple[str, str], ...]:
    """Return the function and file of each frame of the main thread, innermost first."""
    threads = _threads(stack)
    for name, frames in threads:
        if name == "MainThread":
            return frames
    return threads[0][1] if threads else ()


def _threads(stack: str) -> list[tuple[str, tuple[tuple[str, str], ...]]]:
    found: list[tuple[str, list[tuple[str, str]]]] = []
    for line in stack.splitlines():
        header = _THREAD.match(line)
        frame = _FRAME.match(line)
        if header is not None:
            found.append((header["name"] or "", []))
        elif frame is not None and found:
            found[-1][1].append((frame["function"], frame["file"]))
    return [(name, tuple(frames)) for name, frames in found if frames]


def _shown(stack: str) -> str:
    """Return a stack dump, main thread first, without thread numbers, which do not help users."""
    parts = re.split(r"^(?=Thread )", stack.strip(), flags=re.MULTILINE)
    parts = [each.rstrip() for each in parts if each.startswith("Thread ")] or [stack.strip()]
    parts.sort(key=lambda part: '"MainThread"' not in part)
    return "\n".join(re.sub(r'^Thread \S+(?: \([^)]*\))?:? "', 'Thread "', each) for each in parts)


def _normalised(stack: str) -> str:
    """Return a stack dump without the parts that differ between ranks that do the same work."""
    lines: list[str] = []
    for name, frames in sorted(_threads(stack), key=lambda thread: thread[0] != "MainThread"):
        lines.append(f'Thread "{_NUMBER.sub("#", name)}"')
        lines += (f"    {_NUMBER.sub('#', function)} ({file})" for function, file in frames)
    return "\n".join(lines)


def _listed(ranks: tuple[int, ...]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))

"""Detect silent data corruption by comparing the state's replicas, which must stay identical. Pure.

The ranks of a DDP group compute bitwise identical parameters and optimizer state from the same sums. Each
member seals its snapshots, that is, it computes their checksums. To make all members seal the same steps,
only steps that are multiples of a power of two are sealed. If the seals of a step differ, the members outside
the majority are corrupt. A majority is more than half of the whole group, so in a group of two members,
neither can be blamed.

The protected state of a script may differ from rank to rank by design. Members are therefore blamed only if
the replicas have matched on all members at `AGREED` earlier steps. If the replicas still differ after
`TRIES` roll-backs, the cause is the script's computation and not corruption, and no more faults are reported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final

from supervisor.view.model import Fault, View

KIND: Final = "diverged"
AGREED = 2  # how many earlier steps must have had matching replicas
TRIES = 3  # after this many roll-backs, no more faults are reported


def find_divergence(view: View) -> Fault | None:
    """Return the fault if replicas that used to match now differ; None otherwise.

    The fault's step is the newest one where the replicas matched. On every member, all later states are
    unusable, because corrupt values have entered the sums that all members share.
    """
    if sum(past.kind == KIND for past in view.memory.history) >= TRIES:
        return None
    members = len(view.memory.placement)
    known = sorted({*view.memory.equal, *_equal_now(view)})
    for (step, _), crcs in sorted(_checksums(view).items()):
        if len(set(crcs.values())) < 2:
            continue
        agreed = [each for each in known if each < step]
        if len(agreed) >= AGREED and (len(crcs) == members or minority(crcs, members)):
            return _fault(view, agreed[-1], step, crcs)
    return None


def equal_steps(view: View) -> tuple[int, ...]:
    """Return the last steps where all replicas are known to have matched, oldest first.

    A roll-back replaces the steps beyond the resume point with the resume point (`rolled_back`).
    """
    return tuple(sorted({*view.memory.equal, *_equal_now(view)}))[-AGREED:]


def rolled_back(equal: tuple[int, ...], step: int) -> tuple[int, ...]:
    """Return `equal` after a resume from `step`.

    Later steps become `step`, because all replicas load its state.
    """
    return tuple(sorted({min(each, step) for each in equal}))


def _equal_now(view: View) -> tuple[int, ...]:
    members = len(view.memory.placement)
    return tuple(
        step
        for (step, _), crcs in _checksums(view).items()
        if len(crcs) == members > 1 and len(set(crcs.values())) == 1
    )


def _checksums(view: View) -> dict[tuple[int, int], dict[str, int]]:
    """Return the current generation's checksums by (step, size of the state) and then by member."""
    found: dict[tuple[int, int], dict[str, int]] = {}
    for member in view.members:
        if member.name in view.memory.positions and member.report is not None:
            for seal in member.report.seals:
                if seal.generation == view.memory.generation:
                    found.setdefault((seal.step, seal.total_bytes), {})[member.name] = seal.crc
    return found


def minority(crcs: Mapping[str, int], members: int) -> tuple[str, ...]:
    """Return the members whose checksums differ from the majority's; () if there is no majority.

    A majority is more than half of `members`, the size of the whole group.
    """
    (majority, count), *_ = Counter(crcs.values()).most_common()
    return tuple(name for name in crcs if crcs[name] != majority) if 2 * count > members else ()


def _fault(view: View, agreed: int, step: int, crcs: Mapping[str, int]) -> Fault:
    corrupt = minority(crcs, len(view.memory.placement))
    member = corrupt[0] if corrupt else ""
    rank = view.memory.positions[member] * view.memory.nproc if corrupt else -1
    who = f"{', '.join(corrupt)} differs from the others" if corrupt else f"{' and '.join(crcs)} differ"
    listed = ", ".join(f"{name} {crc:08x}" for name, crc in crcs.items())
    return Fault(
        KIND,
        rank,
        member,
        agreed,
        view.now_ns,
        f"{KIND} {member}",
        f"replicas no longer match: at step {step} {who} (checksums {listed}); they matched at step {agreed}",
    )

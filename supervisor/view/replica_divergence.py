"""Find replicas that are no longer equal: nothing else shows silent data corruption. Pure.

The ranks of a DDP group compute the same parameters and optimizer state from the same sums, bit by bit. Each
member computes a checksum of its snapshots anyway (it seals them), at steps that are multiples of a power of
two, so that members seal the same steps. If two seals of one step differ, the majority shows which member is
corrupt, as soon as it is a majority of the whole group; of two members alone, neither can be blamed.

Members are blamed only if the replicas were equal before, at `AGREED` steps and on all members: a script
whose protected state differs from rank to rank by design is left alone. After `TRIES` roll-backs, so is a
script whose replicas differ again and again: that is how it computes, and not corruption.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from supervisor.view.model import Fault, View

KIND = "diverged"
AGREED = 2  # steps
TRIES = 3  # roll-backs


def find_divergence(view: View) -> Fault | None:
    """Return the fault of replicas that were equal and differ now. Its step is the newest at which they were.

    All later states are as bad as the step at which they differ, on every member: the corrupt values went
    into the sums of all.
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
    """Return the last steps at which all replicas are known to have been equal, oldest first.

    They belong to the present line of training: a roll-back removes the steps beyond it.
    """
    return tuple(sorted({*view.memory.equal, *_equal_now(view)}))[-AGREED:]


def rolled_back(equal: tuple[int, ...], step: int) -> tuple[int, ...]:
    """Return the steps of `equal` after a resume from `step`, at which the replicas are equal too."""
    return tuple(sorted({min(each, step) for each in equal}))


def _equal_now(view: View) -> tuple[int, ...]:
    members = len(view.memory.placement)
    return tuple(
        step
        for (step, _), crcs in _checksums(view).items()
        if len(crcs) == members > 1 and len(set(crcs.values())) == 1
    )


def _checksums(view: View) -> dict[tuple[int, int], dict[str, int]]:
    """Return the checksums of the present generation by step and size of the state, and then by member."""
    found: dict[tuple[int, int], dict[str, int]] = {}
    for member in view.members:
        if member.name in view.memory.placement and member.report is not None:
            for seal in member.report.seals:
                if seal.generation == view.memory.generation:
                    found.setdefault((seal.step, seal.total_bytes), {})[member.name] = seal.crc
    return found


def minority(crcs: Mapping[str, int], members: int) -> tuple[str, ...]:
    """Return the members that differ from the majority; none unless more than half of `members` agree."""
    (majority, count), *_ = Counter(crcs.values()).most_common()
    return tuple(name for name in crcs if crcs[name] != majority) if 2 * count > members else ()


def _fault(view: View, agreed: int, step: int, crcs: Mapping[str, int]) -> Fault:
    corrupt = minority(crcs, len(view.memory.placement))
    member = corrupt[0] if corrupt else ""
    rank = view.memory.placement.index(member) * view.memory.nproc if corrupt else -1
    who = f"that of {', '.join(corrupt)} is not the others'" if corrupt else f"{' and '.join(crcs)} differ"
    listed = ", ".join(f"{name} {crc:08x}" for name, crc in crcs.items())
    return Fault(
        KIND,
        rank,
        member,
        agreed,
        view.now_ns,
        f"{KIND} {member}",
        f"replicas are no longer equal: at step {step} {who} (checksums {listed}); equal at step {agreed}",
    )

"""Are the replicas still equal? Silent corruption shows nowhere else. Pure.

The ranks of a DDP group make the same parameters and optimizer state from the same sums, bit by bit. Every
member seals its snapshots with a checksum anyway, at steps that are multiples of a power of two, so that
members meet. Where two seals of one step differ, the majority names the liar, as soon as it is one of the
whole group; two members alone cannot tell.

Blamed is only what has been equal before, at `AGREED` steps and on all members: a script whose
protected state differs from rank to rank by design is left alone. And after `TRIES` times so is one that
comes to differ again and again: that is how it computes, and no corruption.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from supervisor.view.model import Fault, View

KIND = "diverged"
AGREED = 2  # steps
TRIES = 3  # roll backs


def find_divergence(view: View) -> Fault | None:
    """Return the fault of replicas that were equal and are not. Its step is the newest that was.

    Later states are as bad as the step in which they differ, on every member: what the liar computed
    went into the sums of all.
    """
    if sum(past.kind == KIND for past in view.memory.history) >= TRIES:
        return None
    members = len(view.memory.placement)
    known = sorted({*view.memory.equal, *_equal_now(view)})
    for (step, _), found in sorted(_by_step(view).items()):
        if len(set(found.values())) < 2:
            continue
        agreed = [each for each in known if each < step]
        if len(agreed) >= AGREED and (len(found) == members or minority(found, members)):
            return _fault(view, agreed[-1], step, found)
    return None


def equal_steps(view: View) -> tuple[int, ...]:
    """Return the last steps at which all replicas are known to have been equal, oldest first.

    They are of the present line of training: what is rolled back behind them is forgotten with the roll back.
    """
    return tuple(sorted({*view.memory.equal, *_equal_now(view)}))[-AGREED:]


def rolled_back(equal: tuple[int, ...], step: int) -> tuple[int, ...]:
    """Return what is left of `equal` when the group resumes from `step`, at which they are equal too."""
    return tuple(sorted({min(each, step) for each in equal}))


def _equal_now(view: View) -> tuple[int, ...]:
    members = len(view.memory.placement)
    return tuple(
        step
        for (step, _), found in _by_step(view).items()
        if len(found) == members > 1 and len(set(found.values())) == 1
    )


def _by_step(view: View) -> dict[tuple[int, int], dict[str, int]]:
    """Return the checksum that each member has for each step (and size) of the present generation."""
    found: dict[tuple[int, int], dict[str, int]] = {}
    for member in view.members:
        if member.name in view.memory.placement and member.report is not None:
            for seal in member.report.seals:
                if seal.generation == view.memory.generation:
                    found.setdefault((seal.step, seal.total_bytes), {})[member.name] = seal.crc
    return found


def minority(found: Mapping[str, int], members: int) -> tuple[str, ...]:
    """Return who is not of the majority; nobody where no more than half of all members agree."""
    (crc, count), *_ = Counter(found.values()).most_common()
    return tuple(name for name in found if found[name] != crc) if 2 * count > members else ()


def _fault(view: View, agreed: int, step: int, found: Mapping[str, int]) -> Fault:
    named = minority(found, len(view.memory.placement))
    member = named[0] if named else ""
    rank = view.memory.placement.index(member) * view.memory.nproc if named else -1
    who = f"that of {', '.join(named)} is not the others'" if named else f"{' and '.join(found)} differ"
    crcs = ", ".join(f"{name} {crc:08x}" for name, crc in found.items())
    return Fault(
        KIND,
        rank,
        member,
        agreed,
        view.now_ns,
        f"{KIND} {member}",
        f"replicas are no longer equal: at step {step} {who} (checksums {crcs}); equal at step {agreed}",
    )

"""Tell what dead ranks left behind from what a living rank has started in the background. Pure but for /proc.

Both come to the launcher as orphans. A rank leads a session, and what it starts is in it: data loader and
compile workers, a server in the background. What has made a session of its own has the rank's environment,
where the generation is. What has neither may be a living rank's if it is younger than one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_MARK = b"HOLDFAST_GENERATION="


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a process comes from. `began`: clock ticks since boot. `generation`: -1 if it does not say."""

    session: int
    began: int
    generation: int = -1


def origin(pid: int) -> Origin | None:
    """Return the origin of `pid`, None when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2].split()
        return Origin(int(fields[3]), int(fields[19]), _generation(pid))
    except (OSError, IndexError, ValueError):
        return None


def _generation(pid: int) -> int:
    try:
        found = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # it has changed its user
        return -1
    marks = [word.removeprefix(_MARK) for word in found if word.startswith(_MARK)]
    return int(marks[-1]) if marks and marks[-1].isdigit() else -1


def is_left(orphan: Origin, present: Mapping[int, int], past: Mapping[int, int], generation: int) -> bool:
    """True for what ranks of before `generation` have left; when in doubt, False.

    Args:
        orphan: A process whose parent has ended.
        present: When each process began that is a rank of `generation`, or may become one, by pid.
        past: The same of those that have ended, or are about to.
        generation: The one that runs.
    """
    if orphan.session in present:
        return False
    if orphan.session in past:
        return True
    if orphan.generation >= 0:
        return orphan.generation < generation
    older = all(orphan.began < began for began in present.values())
    return older and any(began <= orphan.began for began in past.values())

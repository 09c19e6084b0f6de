"""Looks for processes that cannot be ended: those stuck in the kernel, and in the NVIDIA driver."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from nodeagent.host import driver_stack, uninterruptible
from nodeagent.host.threads import STATUS_BYTES, Stat, switches
from nodeagent.host.uninterruptible import MAX_SUSPECTS, Asleep, Key, Suspect
from nodeagent.host.walk import Walk
from nodeagent.observation import NODE
from nodeagent.reading import LeftOut, Reading, content, text

IN_DRIVER_S = 10.0  # seen twice without a switch; how long is too long is the policy's
MAX_STACKS = 64
NO_STACK = (
    "neither /proc/PID/stack (CAP_SYS_ADMIN) nor /proc/PID/wchan (CAP_SYS_PTRACE) may be read: "
    "which driver a stuck process waits for cannot be told"
)


class Stuck:
    """Sees the processes of one procfs: those of the host need the host's PID namespace."""

    checks = frozenset({"uninterruptible", "gpu_process_stuck"})

    def __init__(self, proc: str, walk: Walk | None = None) -> None:
        self._proc = proc
        self._walk = walk or Walk(proc)
        self._suspects: dict[Key, Suspect] = {}
        self._is_blind = False

    def read(self, due: frozenset[str], now_s: float) -> Iterable[Reading]:
        self._suspects = uninterruptible.suspects(self._suspects, self._asleep(), now_s)
        if "uninterruptible" in due:
            stuck = uninterruptible.longer(self._suspects, now_s, uninterruptible.STUCK_S)
            yield _counted("uninterruptible", stuck, now_s)
        if "gpu_process_stuck" in due:
            self._is_blind = not self._may_see_stacks()
            if not self._is_blind:
                stuck = uninterruptible.longer(self._suspects, now_s, IN_DRIVER_S)
                yield _counted("gpu_process_stuck", self._in_driver(stuck), now_s)

    def left_out(self) -> tuple[LeftOut, ...]:
        return (LeftOut("gpu_process_stuck", NO_STACK),) if self._is_blind else ()

    def _asleep(self) -> dict[Key, Asleep]:
        # Those known go first: the walk comes to each of them only now and then.
        known = [(key, self._walk.stat(key)) for key in self._suspects]
        still = [(key, each) for key, each in known if each is not None and each.is_asleep]
        found = dict([*still, *self._walk.asleep()])
        described = {key: self._described(key, each) for key, each in list(found.items())[:MAX_SUSPECTS]}
        return {key: each for key, each in described.items() if each is not None}

    def _described(self, key: Key, found: Stat) -> Asleep | None:
        count = switches(content(self._path(key, "status"), STATUS_BYTES) or b"")
        return None if count is None else Asleep(found.name, found.start, count, self._wait_channel(key))

    def _wait_channel(self, key: Key) -> str:
        """Return what it waits in. The kernel writes 0 for those that may not know."""
        found = text(content(self._path(key, "wchan"))) or ""
        return "" if found == "0" else found

    def _in_driver(self, stuck: Mapping[Key, Suspect]) -> dict[Key, Suspect]:
        return {
            key: each
            for key, each in list(stuck.items())[:MAX_STACKS]
            if driver_stack.in_driver(self._stack(key), each.asleep.wait_channel)
        }

    def _stack(self, key: Key) -> bytes | None:
        return content(self._path(key, "stack"), driver_stack.STACK_BYTES)

    def _may_see_stacks(self) -> bool:
        """Try with process 1, which sleeps nearly always."""
        return bool(self._stack((1, 1)) or self._wait_channel((1, 1)))

    def _path(self, key: Key, name: str) -> str:
        pid, tid = key
        return f"{self._proc}/{pid}/task/{tid}/{name}"


def _counted(check: str, stuck: Mapping[Key, Suspect], now_s: float) -> Reading:
    value = float(uninterruptible.processes(stuck))
    return Reading(check, NODE, value, uninterruptible.words(stuck, now_s))

"""End the processes that ranks leave behind, which then become children of the launcher.

`holdfast.inspection.left_processes` tells orphans of dead ranks from orphans of live ranks, and orphans that
still work from those that are idle.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable

from holdfast.inspection import left_processes, process_stats
from holdfast.inspection.left_processes import BackgroundProcesses
from holdfast.process import linux

# How long to wait for killed processes to exit. The kernel takes more than a second to free gigabytes.
END_S = 5.0


class Orphans:
    """Kills the orphans of dead ranks while the member runs, and ends all others after the last rank."""

    def __init__(self) -> None:
        self._past_starts: dict[int, int] = {}  # start times, in ticks, of processes that have exited, by pid
        self._end_s = 0.0  # when all remaining orphans are left to `kill_all`
        self._asked_to_end: set[int] = set()  # orphans that have been sent SIGTERM
        self._background: BackgroundProcesses | None = None  # orphans that may finish their work

    def parent_ended(self, pid: int) -> None:
        """Record that a process of a rank has exited. Call this before the process is reaped."""
        self._past_starts |= _start_ticks([pid])

    def sweep(
        self, present: set[int], dying: set[int], generation: int, is_zygote: Callable[[int], bool]
    ) -> None:
        """Kill processes that dead ranks left behind, such as data loader workers, and reap orphaned zombies.

        Background processes of live ranks keep running.

        Args:
            present: The processes that are, or may become, ranks of `generation`.
            dying: The processes of ranks that are about to end.
            generation: The running generation.
            is_zygote: Whether a process is one of the member's zygotes.
        """
        known = self._past_starts
        past = {pid: began for pid, began in known.items() if pid not in present} | _start_ticks(dying)
        began = {pid: known[pid] for pid in present & known.keys()} | _start_ticks(present)
        for pid in linux.children():
            if pid in present or pid in dying or is_zygote(pid):
                continue
            found = left_processes.origin(pid)
            if linux.state_of(pid)[0] == "Z":
                _reap(pid)
            elif found is not None and left_processes.is_left(found, began, past, generation):
                for each in (pid, *process_stats.descendants(pid)):
                    linux.kill_group(each)
                _reap(pid)

    def begin_to_end(self, until_s: float, *, let_work: bool) -> None:
        """Allow `end` to end the orphans until `until_s`.

        If `let_work`, working orphans may run until then.
        """
        self._end_s = until_s
        self._background = BackgroundProcesses() if let_work else None

    def end(self, now_s: float, print_line: Callable[[str], None]) -> bool:
        """Send SIGTERM to the orphans; return True while there are orphans to wait for.

        If working orphans may finish, SIGTERM is sent only to idle ones, and `print_line` is called with a
        line about each process that the script left in the background. Once the time is up, return False.
        """
        for pid in linux.children():
            _reap(pid)
        alive = set(linux.children())
        if now_s >= self._end_s:
            if self._background is not None:
                _print_background(alive, "did not end within --grace: killing it", print_line)
            return False
        resting = alive if self._background is None else self._background.resting(alive, now_s)
        new = resting - self._asked_to_end
        if self._background is not None:
            _print_background(new, "is idle although the run has ended: sending SIGTERM", print_line)
        for pid in new:
            linux.kill_group(pid, signal.SIGTERM)
        self._asked_to_end = resting
        return bool(alive)


def kill_all() -> None:
    """Kill all remaining descendants and wait for them, because none may outlive the launcher.

    A process that waits for a device or a file system may not end within `END_S`. It is then left to the
    process that adopts the launcher's orphans.
    """
    dead: set[int] = set()
    give_up_at = time.monotonic() + END_S
    while left := set(linux.children()) - dead:
        for pid in left:
            linux.kill_group(pid)
            if linux.collected(pid) is not None:
                dead.add(pid)
        if time.monotonic() > give_up_at:
            return
        time.sleep(linux.PAUSE_S)


def _print_background(pids: Iterable[int], what: str, print_line: Callable[[str], None]) -> None:
    for pid in sorted(pids):
        command = left_processes.command_of(pid)
        if command:
            print_line(f"process {pid} ({command}), which the script left in the background, {what}")


def _start_ticks(pids: Iterable[int]) -> dict[int, int]:
    """Return the start time, in ticks since boot, of each of the `pids` that exists, including zombies."""
    found = {pid: left_processes.origin(pid) for pid in pids if pid}
    return {pid: each.began for pid, each in found.items() if each is not None}


def _reap(pid: int) -> None:
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return

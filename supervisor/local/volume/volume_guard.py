"""Check that the run's in-memory folder is complete: at each reported removal, and at intervals."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from supervisor.local.volume.removal_watcher import RemovalWatcher
from supervisor.local.volume.volume_repair import VolumeRepair

REPAIR_S = 0.25  # the interval between checks that the run's folder is complete
# Between two complete checks, the folders are searched only if one of them has changed. So if inotify is
# unavailable, the permissions of a file are restored after this time. All else is found at the next check.
COMPLETE_S = 2.0


class VolumeGuard:
    """Restores what other programs remove from a run's folder. `repair` adds and frees members' folders."""

    def __init__(self, runtime: Path, say: Callable[[str], None]) -> None:
        """`say` is called with lines for the user."""
        self.repair = VolumeRepair(runtime)
        self._removals = RemovalWatcher()
        self._say = say
        self._checked_s = 0.0  # when the folder was last checked
        self._complete_s = -COMPLETE_S  # when everything in it was last checked

    @property
    def descriptor(self) -> int:
        """Readable after a removal: call `restore_removed` then. It is -1 if removals are not reported."""
        return self._removals.descriptor

    def begin(self) -> None:
        """Keep the folder complete from now on. Raises `OSError`."""
        self.repair.begin()
        self._removals.open()

    def restore_removed(self, *, wanted: bool = True) -> None:
        """Immediately restore what was removed, because a fault can occur before the next check.

        Unless `wanted` is true, restore nothing and only discard the report of the removal.
        """
        self._removals.drain()
        if not wanted:
            return
        with suppress(OSError):  # the removal is still in progress; the next event or check tries again
            self.repair.put_back()
        self._removals.watch(self.repair.folders())

    def check(self, now_s: float) -> bool:
        """If a check is due, restore what was removed, or tell the user that it cannot be restored.

        Returns True if `VolumeRepair.error` has changed.
        """
        if now_s - self._checked_s < REPAIR_S:
            return False
        self._checked_s = now_s
        if now_s - self._complete_s < COMPLETE_S and self.repair.is_unchanged():
            return False
        self._complete_s = now_s
        before = self.repair.error
        for line in self.repair.repair(now_s):
            self._say(line)
        self._removals.watch(self.repair.folders())
        return self.repair.error != before

    def close(self) -> None:
        self.repair.close()
        self._removals.close()

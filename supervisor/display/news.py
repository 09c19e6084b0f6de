"""Describe what has changed between two statuses of a run, with a line for each change. Pure except for
`recall`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from supervisor.wording import sentence, slowness, what

_TRACEBACK_LINES = 40
_MAX_MISSED = 20  # how many incidents between two statuses are shown


@dataclass(frozen=True, slots=True)
class IncidentRecords:
    """Gives access to the records of incidents.

    A status contains only the newest incident, but several may be new. `recall` returns the record of an
    incident by number; None if it cannot be read. Incidents with numbers up to `before` belong to an earlier
    run.
    """

    recall: Callable[[int], Mapping[str, Any] | None] = lambda _: None
    before: int = 0


NO_RECORDS = IncidentRecords()


class _SlowRanks:
    """Tracks which ranks were shown as slow."""

    def __init__(self) -> None:
        self._shown: set[object] = set()
        self._judge: tuple[object, object] = (None, None)

    def observe(self, status: Mapping[str, Any]) -> list[str]:
        """Return a line for each change. A new supervisor or generation begins without slow ranks."""
        judge = (status.get("supervisor_pid"), status.get("generation"))
        if judge != self._judge:
            self._judge, self._shown = judge, set()
        news = []
        for each in status.get("ranks") or ():
            rank, is_slow = each.get("rank"), bool(each.get("slow"))
            if is_slow != (rank in self._shown):
                self._shown ^= {rank}
                news.append(
                    f"rank {rank} is slow: {slowness(each)}" if is_slow else f"rank {rank} is no longer slow"
                )
        return news


class _WarmFailures:
    """Tracks which members were shown as unable to create warm processes."""

    def __init__(self) -> None:
        # By name of the member: whether ranks wait for its processes. The error text is not stored, because
        # it can differ each time.
        self._failing: dict[object, bool] = {}

    def observe(self, status: Mapping[str, Any]) -> list[str]:
        """Return a line for each change."""
        news = []
        for each in status.get("members") or ():
            name, error = each.get("name"), each.get("warm_error")
            awaited = bool(each.get("warm_awaited"))
            if error and self._failing.get(name) != awaited:
                self._failing[name] = awaited
                news.append(str(error))
            elif not error and name in self._failing and each.get("parked"):
                del self._failing[name]
                news.append(f"warm processes for member {name} are available again")
        return news


class _OwnParts:
    """Tracks the pids of Holdfast's own processes, which are replaced while training continues."""

    def __init__(self) -> None:
        self._pids: dict[str, int] = {}  # by the name of the process

    def observe(self, status: Mapping[str, Any]) -> list[str]:
        """Return a line for each process that another one has replaced."""
        found = {"the supervisor": status.get("supervisor_pid")}
        for each in status.get("members") or ():
            if each.get("connected"):
                found[f"the sidecar of member {each.get('name')}"] = each.get("sidecar_pid")
        news = []
        for name, pid in found.items():
            if type(pid) is not int:
                continue
            if self._pids.setdefault(name, pid) != pid:
                self._pids[name] = pid
                news.append(f"a new process has taken over as {name}")
        return news


class StatusNews:
    """Compares each status with what was shown before, and returns the lines to add.

    The lines report incidents that begin or end, checkpoints that are not used or cannot be written, slow
    ranks, members without warm processes, Holdfast's own processes that were replaced, and warnings.
    """

    def __init__(self, incidents: IncidentRecords) -> None:
        self._incidents = incidents
        self._last_ended = incidents.before  # the newest incident that was shown as ended
        self._shown: set[tuple[object, object]] = set()
        self._slow = _SlowRanks()
        self._warm = _WarmFailures()
        self._own = _OwnParts()
        self._storage_fails = False

    def observe(self, status: Mapping[str, Any]) -> list[str]:
        """Return a line for each change, but only one for an incident that ended before it was shown."""
        news = [*self._slow.observe(status), *self._warm.observe(status), *self._storage(status)]
        news += self._own.observe(status)
        warm = {each.get("warm_error") for each in status.get("members") or ()}
        for name in ("passed_over", "warnings"):
            for note in status.get(name) or ():
                if (name, note) not in self._shown and note not in warm:
                    self._shown.add((name, note))
                    news.append(note)
        last, opened = status.get("last_incident"), status.get("open_incident")
        if last and not last.get("open"):
            news += [line for found in (*self._missed(last), last) for line in self._ended(found)]
        number = _number(opened)
        if opened:
            news += self._before(number)
        if opened and number > self._last_ended and ("open", number) not in self._shown:
            self._shown.add(("open", number))
            news += _line(opened, what(opened))
        return news

    def _before(self, number: int) -> list[str]:
        """Return the lines of incidents that ended before incident `number` and were not shown yet."""
        lines: list[str] = []
        for each in range(max(self._last_ended + 1, number - _MAX_MISSED), number):
            found = self._incidents.recall(each)
            if found is None or found.get("open"):
                break  # the incident will be shown when it has ended
            lines += self._ended(found)
        return lines

    def _missed(self, last: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Return the incidents before `last` that began and ended between two statuses."""
        numbers = range(max(self._last_ended + 1, _number(last) - _MAX_MISSED), _number(last))
        return [found for number in numbers if (found := self._incidents.recall(number)) is not None]

    def _ended(self, found: Mapping[str, Any]) -> list[str]:
        """Return the lines of an incident that has ended; [] if they were already shown."""
        if _number(found) <= self._last_ended:
            return []
        self._last_ended = _number(found)
        return [*_line(found, sentence(found)), *_traceback(found)]

    def _storage(self, status: Mapping[str, Any]) -> list[str]:
        """Return a line when writing checkpoints begins to fail, and one when it works again."""
        error = str((status.get("checkpoint") or {}).get("error") or "")
        if bool(error) == self._storage_fails:
            return []
        self._storage_fails = bool(error)
        fails = f"no checkpoint can be written: {error}; training continues, and saving is retried"
        return [fails if error else "checkpoints can be written again"]


def _number(incident: Mapping[str, Any] | None) -> int:
    digits = str((incident or {}).get("id") or "").removeprefix("i-")
    return int(digits) if digits.isdecimal() else 0


def _line(incident: Mapping[str, Any], words: str) -> list[str]:
    # Input that the script rejects is reported only once, at the end of the run.
    return [] if incident.get("kind") == "bad_input" else [f"incident {incident.get('id')}: {words}"]


def _traceback(incident: Mapping[str, Any]) -> list[str]:
    """Return the last lines of a rank that lost its peers although none failed. No log contains them."""
    if incident.get("kind") != "victim" or incident.get("remedy") == "stop":  # printed at the end of the run
        return []
    return str(incident.get("message") or "").strip("\n").splitlines()[-_TRACEBACK_LINES:]

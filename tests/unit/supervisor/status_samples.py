"""Samples of a run's status and incidents, and a terminal to show them on."""

from __future__ import annotations

import re
from typing import Any

from supervisor.display.ansi import Style


def member(name: str, ranks: list[int], **changed: Any) -> dict[str, Any]:
    return {
        "name": name,
        "node": f"{name}-node",
        "role": "active" if ranks else "standby",
        "connected": True,
        "parked": 2,
        "ranks": ranks,
        "launcher_pid": 10,
        "sidecar_pid": 11,
        **changed,
    }


def rank(number: int, owner: str, **changed: Any) -> dict[str, Any]:
    return {
        "rank": number,
        "member": owner,
        "pid": 4000 + number,
        "state": "running",
        "step": 1234,
        "phase": "forward",
        "label": "",
        "loss": 2.4,
        "step_s": 0.07,
        "p99_s": 0.08,
        "own_s": 0.031,
        "own_data_s": 0.004,
        "slow": None,
        "slow_since": None,
        "peers_s": None,
        **changed,
    }


def status(**changed: Any) -> dict[str, Any]:
    return {
        "run": "a-run",
        "phase": "running",
        "generation": 3,
        "world_size": 2,
        "group": {"members": 2, "of": 2},
        "step": 1234,
        "loss": 2.41312,
        "step_s": 0.07,
        "rate": 14.2,
        "samples_per_s": 454.0,
        "tokens_per_s": None,
        "ettr": 0.9921,
        "ettr_hour": 0.99,
        "buckets_s": {"productive": 95.0, "lost": 0.5, "detect": 0.004, "start": 4.0, "stop": 0.0},
        "pending_s": 0.5,
        "total_s": 100.0,
        "members": [member("m-0", [0]), member("m-1", [1]), member("m-2", [])],
        "ranks": [rank(0, "m-0"), rank(1, "m-1")],
        "incidents": 1,
        "last_incident": incident(),
        "open_incident": None,
        "secured_step": 1234,
        "snapshot_step": 1230,
        "checkpoint": {"step": 1200, "path": "step-00001200", "error": ""},
        "skip": [],
        "exit_code": None,
        "message": "generation 3 has completed its first step",
        "updated": 1_000_000.0,
        "supervisor_pid": 77,
        "warm_ready": True,
        **changed,
    }


def incident(number: int = 1, **changed: Any) -> dict[str, Any]:
    detail = "rank 1 was killed by SIGKILL"
    measure = "restart the processes in place, from the snapshot of step 812"
    why = f"{detail}: {measure}"
    return {
        "id": f"i-{number:04d}",
        "kind": "crash",
        "rank": 1,
        "member": "m-1",
        "step": 812,
        "generation": 2,
        "at": 1_000_000.0,
        "detected_s": 0.0031,
        "recovered_s": 0.131,
        "lost_steps": 0,
        "remedy": "restart",
        "why": why,
        "resume": {"step": 812, "source": "slot", "generation": 2},
        "evidence": ["rank 0 is only a victim"],
        "faults": [{"kind": "crash", "rank": 1, "member": "m-1", "detail": detail, "message": ""}],
        "decision": {"action": "restart", "why": why, "measure": measure},
        "timeline": [
            {"what": "fault", "at_s": 0.0},
            {"what": "noticed", "at_s": 0.003},
            {"what": "decided", "at_s": 0.05},
            {"what": "first step", "at_s": 0.1},
        ],
        "stacks": [
            {"ranks": [0, 2, 3], "stack": 'Thread "MainThread"\n    all_reduce (dist.py)'},
            {"ranks": [1], "stack": 'Thread "MainThread"\n    sleep (train.py)'},
        ],
        "message": "",
        "open": False,
        **changed,
    }


def opened(number: int = 1, **changed: Any) -> dict[str, Any]:
    return incident(number, recovered_s=None, lost_steps=None, remedy="", open=True, **changed)


_CODE = re.compile(r"\x1b\[(?P<digits>\??[0-9;]*)(?P<what>[A-Za-z])")


class Terminal:
    """A terminal that wraps, scrolls, and obeys the control sequences that the display sends."""

    def __init__(self, columns: int = 80, lines: int = 24, style: Style | None = None) -> None:
        self.columns, self.height = columns, lines
        self.style = Style(True, True) if style is None else style
        self.busy = False
        self.writes: list[str] = []
        self.closed = False
        self._rows: list[str] = [""]
        self._row = self._column = 0

    def size(self) -> tuple[int, int]:
        return self.columns, self.height

    def flush(self) -> None:
        pass

    @property
    def write_error(self) -> str:
        return ""

    def close(self) -> None:
        self.closed = True

    def shown(self) -> list[str]:
        """Return all lines that are not empty, including those that have scrolled off."""
        return [row.rstrip() for row in self._rows if row.strip()]

    def write(self, text: str) -> None:
        self.writes.append(text)
        while text:
            code = _CODE.match(text)
            if code is not None:
                self._obey(code["what"], code["digits"])
                text = text[code.end() :]
                continue
            self._put(text[0])
            text = text[1:]

    def _obey(self, what: str, digits: str) -> None:
        if what == "A":
            lowest = max(0, len(self._rows) - self.height)
            self._row = max(lowest, self._row - int(digits or 1))
        elif what == "K":
            self._rows[self._row] = self._rows[self._row][: self._column]
        elif what == "J":
            self._rows[self._row] = self._rows[self._row][: self._column]
            del self._rows[self._row + 1 :]
        else:
            assert what == "m" or digits == "?2026", f"unknown sequence {digits}{what}"

    def _put(self, sign: str) -> None:
        if sign == "\r":
            self._column = 0
            return
        if sign == "\n" or self._column >= self.columns:
            self._row, self._column = self._row + 1, 0
            if self._row == len(self._rows):
                self._rows.append("")
            if sign == "\n":
                return
        assert sign >= " ", f"control character {sign!r}"
        row = self._rows[self._row].ljust(self._column)
        self._rows[self._row] = row[: self._column] + sign + row[self._column + 1 :]
        self._column += 1

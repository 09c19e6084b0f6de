"""The commands that look at a run, living or ended."""

from __future__ import annotations

import difflib
import os
import re
import sys
import time
from pathlib import Path
from typing import Any, TypeAlias

from holdfast.errors import BadInput
from supervisor.cli import checkpoints, commands, control, explain, status
from supervisor.cli.api_client import Refused, Unreachable, api_of
from supervisor.display.live import style_of
from supervisor.display.screen import say, say_all, say_json
from supervisor.observability.incident_record import SCHEMA
from supervisor.store import journal, run_directory
from supervisor.store.run_directory import RunDir

_SINCE_ADDED: dict[str, Any] = {"schema": SCHEMA, "overtaken_by": None}  # records of before lack these
Obeyed: TypeAlias = "commands.Reading | commands.Stop | commands.Inject | commands.Show"


def obey(command: Obeyed) -> int:
    """Carry out a command that starts no run, and return the exit code.

    Raises:
        BadInput: It cannot be obeyed; one line for stderr, exit code 2.
        BrokenPipeError: Whoever read our output has left.
    """
    try:
        return _obey(command)
    except BrokenPipeError:
        # Nothing more can be written; without this Python would complain when it flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise


def _obey(command: Obeyed) -> int:
    if isinstance(command, commands.Show):
        say(command.text)
        return 0
    if isinstance(command, commands.Stop):
        words = "stop --now" if command.now else "stop"
        return control.stop(run_directory.find_living(command.run_dir, Path.cwd(), words), command)
    if isinstance(command, commands.Inject):
        words = f"inject {command.kind} --rank {command.rank}"
        return control.inject(run_directory.find_living(command.run_dir, Path.cwd(), words), command)
    run = run_directory.find(command.run_dir, Path.cwd())
    if isinstance(command, commands.Status):
        return _status(run, command)
    if isinstance(command, commands.Incidents):
        return _incidents(run, command)
    if isinstance(command, commands.Explain):
        return _explain(run, command)
    return _checkpoints(run, command)


def _status(run: RunDir, command: commands.Status) -> int:
    found, alive, live = _newest_status(run)
    unreadable = found is None and run.has_status()
    if command.json:
        say_json({"schema": SCHEMA, **(found or {}), "alive": alive})
        return 1 if unreadable else 0
    if found is None:
        say(f"run {run.path.name} {_without_status(run, alive)}")
        return 1 if unreadable else 0
    say_all(status.status(found, alive=alive, live=live, now_s=time.time(), path=run.path))
    return 0


def _without_status(run: RunDir, alive: bool) -> str:
    if run.has_status():
        return f"has a status that cannot be read: {run.path / 'status.json'}"
    return "is starting: it has no status yet" if alive else "ended before it had a status"


def _newest_status(run: RunDir) -> tuple[dict[str, Any] | None, bool, bool]:
    """Return the status, whether the run is alive, and whether its supervisor said this now."""
    alive = run.is_in_use()
    api = api_of(run) if alive else None
    if api is not None:
        try:
            found = api.get("/v1/status")
        except (Unreachable, Refused):
            found = None  # it is being restarted: it has left its last status
        if isinstance(found, dict):
            return found, True, True
    return run.status(), alive, False


def _known(run: RunDir) -> list[dict[str, Any]]:
    """Return all incidents, the open one too."""
    found = {str(each["id"]): {**_SINCE_ADDED, **each} for each in run.incidents()}
    status, alive, _ = _newest_status(run)
    opened = (status or {}).get("open_incident")
    if alive and isinstance(opened, dict) and opened.get("id"):
        found.setdefault(str(opened["id"]), opened)
    return list(found.values())


def _incidents(run: RunDir, command: commands.Incidents) -> int:
    found = _known(run)
    for name in run.unreadable_incidents():
        sys.stderr.write(f"holdfast: {run.path / 'incidents' / name} cannot be read, and is not shown\n")
    if command.json:
        say_json(found)
    else:
        say_all(status.incidents(found))
    return 0


def _explain(run: RunDir, command: commands.Explain) -> int:
    chosen = _choose(_known(run), command.incident)
    if command.json:
        say_json(chosen)
    else:
        say_all(explain.explain(chosen, style_of(sys.stdout)))
    return 0


def _choose(found: list[dict[str, Any]], word: str) -> dict[str, Any]:
    """Return the incident that `word` means: i-0003, 3 or last."""
    names = [str(each["id"]) for each in found]
    if not names:
        raise BadInput(f"incident {word!r}: this run has had none")
    wanted = names[-1] if word == "last" else f"i-{int(word):04d}" if word.isdecimal() else word
    if wanted in names:
        return found[names.index(wanted)]
    if not re.fullmatch(r"i-\d+", wanted):
        listed = "one that `holdfast incidents` lists, such as 3 or i-0003, or last"
        raise BadInput(f"{word!r} is not the id of an incident: expected {listed}")
    near = difflib.get_close_matches(wanted, names, n=3, cutoff=0.5) or names[-3:]
    raise BadInput(f"incident {word!r} is unknown: choose from {', '.join(sorted(near))}, last")


def _checkpoints(run: RunDir, command: commands.Checkpoints) -> int:
    try:
        held = journal.last(run.journal)
        known = held.memory.lineage if held is not None else ()
        found = checkpoints.survey(run.checkpoints, verify=command.verify, told=_read_now, known=known)
    except OSError as error:
        raise BadInput(f"{run.checkpoints} cannot be read: {error.strerror}") from None
    _read_now("")
    if command.json:
        say_json([each.as_json() for each in found])
    else:
        say_all(checkpoints.lines(found, time.time(), verified=command.verify))
    return 1 if any(each.fault for each in found) else 0


def _read_now(name: str) -> None:
    """Tell which checkpoint is being read, on a line that goes away."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{'reading ' * bool(name)}{name}")
        sys.stderr.flush()

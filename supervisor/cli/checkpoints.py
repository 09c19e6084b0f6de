"""`holdfast checkpoints`: list the checkpoints of a run, and say which of them are intact."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePath
from typing import Any

from holdfast.checkpoint import catalog
from holdfast.errors import BadInput
from holdfast.protocol.lineage import Lineage, merged, valid
from supervisor.cli import command_options
from supervisor.cli.api_client import RunRecords
from supervisor.display.screen import say_all, say_json
from supervisor.observability.incident_record import SCHEMA
from supervisor.store import journal
from supervisor.store.run_directory import RunDir
from supervisor.wording import seconds, size, table

_PASSED_OVER = re.compile(r"checkpoint (\S+) is not used: (.+)", re.DOTALL)  # `UnusableCheckpoint.note`


@dataclass(frozen=True, slots=True)
class CheckpointSummary:
    """A directory that is named like a checkpoint. `fault` says what is wrong with it, if known."""

    name: str
    path: str
    fault: str
    verified: bool  # True if it was read in full
    newest_whole: bool = False
    step: int | None = None
    generation: int | None = None
    world_size: int | None = None
    created: float | None = None  # seconds since the epoch
    bytes: int | None = None
    void: bool = False  # True if it is not usable, because the run has since resumed from an earlier step

    def as_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **asdict(self)}


def show(run: RunDir, command: command_options.Checkpoints) -> int:
    try:
        held = journal.last(run.journal)
        known = held.memory.lineage if held is not None else ()
        found = survey(run.checkpoints, verify=command.verify, reading=_read_now, known=known)
    except OSError as error:
        raise BadInput(f"{run.checkpoints} cannot be read: {error.strerror}") from None
    _read_now("")
    if command.json:
        say_json([each.as_json() for each in found])
    else:
        say_all(lines(found, time.time(), verified=command.verify))
    return 1 if any(each.fault for each in found) else 0


def show_reported(run: RunRecords, command: command_options.Checkpoints) -> int:
    """Show the checkpoints that a job's pods report, because this machine cannot read their storage."""
    status = run.status() or {}
    found = reported(status)
    if command.json:
        say_json([each.as_json() for each in found])
    else:
        say_all(reported_lines(found, str((status.get("checkpoint") or {}).get("error") or "")))
    return 1 if any(each.fault for each in found) else 0


def reported(status: Mapping[str, Any]) -> list[CheckpointSummary]:
    """Return the checkpoints in a status: the newest usable one, and the ones that were not used."""
    newest = status.get("checkpoint") or {}
    found = []
    if newest.get("step") is not None:
        path = str(newest.get("path") or "")
        found.append(CheckpointSummary(PurePath(path).name, path, "", False, True, int(newest["step"])))
    notes = (_PASSED_OVER.fullmatch(str(each)) for each in status.get("passed_over") or [])
    return found + [CheckpointSummary(each[1], each[1], each[2], False) for each in notes if each]


def reported_lines(found: list[CheckpointSummary], error: str) -> list[str]:
    """Return the output of `holdfast checkpoints --job`. `error` says why the pods cannot use the storage."""
    whole = [each for each in found if each.newest_whole]
    shown = [f"newest usable: {each.name} (step {each.step:,})" for each in whole]
    shown = shown or ["the job's pods have reported no usable checkpoint"]
    shown += [f"not used: {each.name}: {each.fault}" for each in found if each.fault]
    shown += [f"storage error: {error}"] if error else []
    return [*shown, "older checkpoints are not listed, because the supervisor cannot read the job's storage"]


def _read_now(name: str) -> None:
    """Show which checkpoint is being read, on a line of the terminal that the next call overwrites."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{'reading ' * bool(name)}{name}")
        sys.stderr.flush()


def survey(
    root: Path, *, verify: bool, reading: Callable[[str], None], known: tuple[Lineage, ...] = ()
) -> list[CheckpointSummary]:
    """Return the checkpoints in `root`, newest first.

    Args:
        root: The directory of checkpoints, which may be missing.
        verify: True to read the checkpoints in full.
        reading: Called with the name of each checkpoint before it is read in full.
        known: The lineage of the run. The lineages in the checkpoints are merged into it.

    Raises:
        OSError: `root` cannot be read.
    """
    surveyed: list[CheckpointSummary] = []
    have_whole = False
    checkpoints = tuple(catalog.each_checkpoint(root))
    lineages = (found.lineage for _, found in checkpoints if isinstance(found, catalog.StoredCheckpoint))
    known = merged(known, *lineages)
    for path, found in checkpoints:
        if not isinstance(found, catalog.StoredCheckpoint):
            surveyed.append(CheckpointSummary(path.name, str(path), str(found), verify))
            continue
        if verify:
            reading(path.name)
        fault = (catalog.verify(found) if verify else None) or ""
        void = not valid(found.generation, found.step, known)
        newest = not fault and not void and not have_whole
        have_whole = have_whole or newest
        surveyed.append(
            CheckpointSummary(
                path.name,
                str(path),
                fault,
                verify,
                newest,
                found.step,
                found.generation,
                found.world_size,
                found.created,
                found.bytes,
                void,
            )
        )
    return surveyed


def lines(surveyed: list[CheckpointSummary], now_s: float, *, verified: bool) -> list[str]:
    """Return the output of `holdfast checkpoints`. `now_s` is the time in seconds since the epoch."""
    if not surveyed:
        return ["no checkpoints"]
    rows = [
        (
            each.name,
            _or_dash(each.generation),
            _or_dash(each.world_size),
            size(each.bytes) if each.bytes is not None else "-",
            f"{seconds(max(0.0, now_s - each.created))} ago" if each.created is not None else "-",
            _verdict(each),
        )
        for each in surveyed
    ]
    head = ("CHECKPOINT", "GENERATION", "RANKS", "SIZE", "WRITTEN", "STATE")
    whole = next((each for each in surveyed if each.newest_whole), None)
    newest = f"newest intact: {whole.path}" if whole else "no checkpoint is intact"
    if not whole and any(each.void and not each.fault for each in surveyed):
        newest = "no checkpoint can be used"
    if whole and not verified:
        newest = f"newest: {whole.path}"
    hint = [] if verified else ["only sizes were compared; --verify reads the contents"]
    return [*table(head, rows, frozenset({1, 2, 3, 4})), "", newest, *hint]


def _verdict(each: CheckpointSummary) -> str:
    if each.fault:
        return each.fault if each.fault.startswith(catalog.FOREIGN) else f"damaged: {each.fault}"
    void = ", void: the run resumed from an earlier step" if each.void else ""
    return ("intact" if each.verified else "complete") + (", newest" if each.newest_whole else void)


def _or_dash(value: int | None) -> str:
    return "-" if value is None else str(value)

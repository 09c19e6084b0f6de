"""`holdfast status`: show the phase of a run, its saved state, its ranks, and where its time went."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from holdfast.protocol import foreign_text
from holdfast.protocol.progress import words_of
from supervisor.cli import command_options
from supervisor.cli.api_client import (
    AGED_S,
    RunRecords,
    age_of,
    is_current,
    newest_status,
    outdated,
    title,
)
from supervisor.display import frame
from supervisor.display.frame import phase
from supervisor.display.screen import say, say_all, say_json
from supervisor.observability.incident_record import SCHEMA
from supervisor.store import journal
from supervisor.store.run_directory import RunDir
from supervisor.wording import count, ettr, part, percent, seconds, sentence, slowness, table, what

LAST_OUTPUT = "Last output of the process that failed"
MAX_OUTPUT_LINES = 60  # of that output, which is at most 32 kB
MAX_SLOW = 5  # slow ranks that are listed one by one
LEDGER_WORDS = {
    "productive": "training",
    "lost": "lost (trained, then rolled back)",
    "unknown": "trained before a restart (how much was kept is unknown)",
    "checkpoint": "waiting for checkpoints",
    "detect": "noticing faults",
    "decide": "deciding (and waiting for members)",
    "stop": "stopping",
    "start": "fetching state, starting processes",
    "rendezvous": "forming the group",
    "restore": "restoring state",
    "warmup": "slow first steps",
    "queued": "waiting for members",
    "paused": "paused",
}


def show(run: RunRecords, command: command_options.Status) -> int:
    found, alive, live = newest_status(run)
    unreadable = found is None and run.has_status()
    if command.json:
        now_s = time.time()
        age = {"age_s": age_of(found, now_s), "current": is_current(found, now_s)} if command.job else {}
        say_json({"schema": SCHEMA, **(found or {}), "alive": alive, **age})
        return 1 if unreadable else 0
    if found is None:
        say(f"{title(run)} {_without_status(run, alive)}")
        return 1 if unreadable else 0
    directory = run.path if isinstance(run, RunDir) else None
    name = f"run {found['run']}" if directory and found.get("run") else title(run)
    say_all(lines(found, alive=alive, live=live, now_s=time.time(), path=directory, name=name))
    return 0


def _without_status(run: RunRecords, alive: bool) -> str:
    if run.has_status():
        return f"has a status that cannot be read: {run.path / 'status.json'}"
    return "is starting and has no status yet" if alive else "ended before it had a status"


def lines(
    found: Mapping[str, Any], *, alive: bool, live: bool, now_s: float, path: PurePath | None, name: str
) -> list[str]:
    """Return the output of `holdfast status` for the run or job `name`; `path` is None for a job."""
    shown = [f"{name}: {_state(found, alive, live, now_s, is_job=path is None)}", ""]
    rows = [
        ("progress", _progress(found)),
        ("group", _group(found)),
        ("state", _safety(found)),
        ("ETTR", _ettr(found)),
        ("incidents", _incidents(found)),
        *(("leaving", text) for text in _leaving(found)),
        *(("standbys", text) for text in _standbys(found)),
        *(("slow", text) for text in _slow(found)),
        *(("warning", " ".join(str(text).split())) for text in found.get("warnings") or []),
        *(("warning", each["note"]) for each in found.get("ranks") or [] if each.get("note")),
        ("warning", _outdated(found, alive, now_s) if path is None else ""),
        ("warning", _journal(found)),
        ("warning", " ".join(str(found.get("volume_error") or "").split())),
        ("message", " ".join(str(found.get("message") or "").split())),
        ("directory", str(path or "")),
    ]
    shown += [f"  {label:10}  {foreign_text.one_line(text)}" for label, text in rows if text]
    ranks = _ranks(found, is_known=alive or found.get("phase") == "ended")
    ledger = _ledger(found)
    sections = (("Ranks", ranks), ("Where the time went", ledger), (LAST_OUTPUT, _last_output(found)))
    for heading, section in sections:
        if section:
            shown += ["", heading, *(f"  {line}" for line in section)]
    return shown


def _group(found: Mapping[str, Any]) -> str:
    """Return how many members train, if the group is smaller than requested; "" otherwise."""
    group = found.get("group") or {}
    members, full = int(group.get("members") or 0), int(group.get("of") or 0)
    if not 0 < members < full:
        return ""
    return f"{members} of {full} members; it grows when a replacement is ready"


def _last_output(found: Mapping[str, Any]) -> list[str]:
    """Return the end of the output or traceback that explains why the run ended."""
    text = str(found.get("traceback") or "").strip("\n")
    return foreign_text.lines(text, colour=False)[-MAX_OUTPUT_LINES:] if text else []


def _journal(found: Mapping[str, Any]) -> str:
    error = " ".join(str(found.get("journal_error") or "").split())
    again = f"retrying every {journal.RETRY_S:g} s"
    return f"decisions cannot be written to the journal: {error}; {again}" if error else ""


def _outdated(found: Mapping[str, Any], alive: bool, now_s: float) -> str:
    age_s = age_of(found, now_s)
    is_old = alive and age_s is not None and is_current(found, now_s) is False
    return outdated("this job", age_s or 0.0) if is_old else ""


def _state(found: Mapping[str, Any], alive: bool, live: bool, now_s: float, *, is_job: bool) -> str:
    name = phase(found)
    age_s = age_of(found, now_s) or 0.0
    if live or (alive and age_s < 2.0):
        name += f", but {frame.stalled(found)}" if frame.stalled(found) else ""
        return f"{name}, {seconds(age_s)} ago" if is_job and age_s >= AGED_S else name
    if alive:
        return f"{name}, {seconds(age_s)} ago; its supervisor does not respond"
    if found.get("phase") == "ended" or found.get("exit_code") is not None:
        code = found.get("exit_code")
        return "ended" + (f" with exit code {code}" if code is not None else "")
    return f"died while {name}, {seconds(age_s)} ago"


def _progress(found: Mapping[str, Any]) -> str:
    if found.get("step") is None:
        return ""
    text = frame.progress(found)
    if found.get("step_s"):
        text += f"  ({seconds(float(found['step_s']))} per step)"
    return text


def _safety(found: Mapping[str, Any]) -> str:
    parts = []
    memory_is_gone = found.get("phase") == "ended"  # a secured state is now either on storage or lost
    if found.get("secured_step") is not None and not memory_is_gone:
        parts.append(f"secured {found['secured_step']:,}")
    if (found.get("snapshot_step") or -1) >= 0 and not memory_is_gone:
        parts.append(f"snapshot {found['snapshot_step']:,}")
    saved = found.get("checkpoint") or {}
    if saved.get("step") is not None:
        parts.append(f"checkpoint {saved['step']:,}")
    if saved.get("error"):
        parts.append(f"storage error: {saved['error']}")
    if found.get("skip"):
        parts.append(f"skipped steps {', '.join(map(str, found['skip']))}")
    return "  ".join(parts)


def _ettr(found: Mapping[str, Any]) -> str:
    if not found.get("total_s"):
        return ""
    if frame.is_ettr_unknown(found):
        its_own = found.get("own_state")
        why = (
            "the script keeps its own state"
            if its_own
            else "all processes that knew the step count were lost"
        )
        return f"unknown ({why})"
    whole = ettr(found.get("ettr") or 0.0)
    hour = percent(float(found.get("ettr_hour") or 0.0))
    return f"{whole} of {seconds(float(found['total_s']))}; {hour} of the last hour"


def _incidents(found: Mapping[str, Any]) -> str:
    opened, last = found.get("open_incident"), found.get("last_incident")
    total = int(found.get("incidents") or 0)
    if opened:
        return f"{total}; now {opened.get('id')}: {what(opened)}"
    if last:
        return f"{total}; last {last.get('id')}: {sentence(last)}"
    return str(total)


def _leaving(found: Mapping[str, Any]) -> list[str]:
    """Return a line for each member that is about to end, with the reason."""
    return [
        f"{each.get('name')} is about to end: {' '.join(str(each['leaving']).split())}"
        for each in found.get("members") or []
        if each.get("leaving")
    ]


def _standbys(found: Mapping[str, Any]) -> list[str]:
    """Return lines about a job's standby pods: how many, where, what they reserve, and why one is missing."""
    shown = found.get("standbys")
    if not isinstance(shown, Mapping):
        return []
    pods = [
        f"{each.get('name')} {each.get('state')}{f' on {node}' if (node := each.get('node')) else ''}"
        for each in shown.get("pods") or []
    ]
    lines = [f"{shown.get('ready')} of {shown.get('wanted')} ready", *pods]
    cost = (
        f"reserve {count(int(shown.get('gpus') or 0), 'GPU')} and {shown.get('cores')} cores;"
        f" {shown.get('gpuHours')} GPU hours and {shown.get('coreHours')} core hours so far"
    )
    problem = " ".join(str(shown.get("problem") or "").split())
    return ["; ".join(lines), cost, *([f"missing: {problem}"] if problem else [])]


def _slow(found: Mapping[str, Any]) -> list[str]:
    """Return a line for each of the slowest ranks."""
    slow = sorted(
        (each for each in found.get("ranks") or [] if each.get("slow")), key=lambda each: -each["slow"]
    )
    lines = [f"rank {each.get('rank')}: {slowness(each)}" for each in slow[:MAX_SLOW]]
    return lines + [f"and {len(slow) - MAX_SLOW} more"] * (len(slow) > MAX_SLOW)


def _doing(rank: Mapping[str, Any]) -> str:
    phase = words_of(str(rank.get("phase") or ""))
    return " ".join(word for word in (phase, rank.get("label")) if word) or "-"


def _ranks(found: Mapping[str, Any], *, is_known: bool) -> list[str]:
    """Return a table of the ranks. Their states are unknown if the run was killed after its last status."""
    rows = [
        (
            str(each.get("rank")),
            str(each.get("member") or "-"),
            str(each.get("pid") or "-"),
            str(each.get("state") or "-") if is_known or each.get("state") == "exited" else "unknown",
            f"{each['step']:,}" if each.get("step") is not None else "-",
            seconds(float(each["step_s"])) if each.get("step_s") else "-",
            seconds(float(each["p99_s"])) if each.get("p99_s") else "-",
            seconds(float(each["own_s"])) if each.get("own_s") else "-",
            _doing(each) if is_known else "-",
        )
        for each in found.get("ranks") or []
    ]
    rows += [
        ("-", str(m.get("name")), "-", "standby", "-", "-", "-", "-", f"{m['parked']} warm")
        for m in found.get("members") or []
        if m.get("role") == "standby" and m.get("parked")
    ]
    if not rows:
        return []
    head = ("RANK", "MEMBER", "PID", "STATE", "STEP", "STEP TIME", "P99", "OWN", "DOING")
    return table(head, rows, frozenset({0, 2, 4, 5, 6, 7}))


def _ledger(found: Mapping[str, Any]) -> list[str]:
    """Return a line for each bucket that is not empty, with productive time first, then sorted by size."""
    total_s = float(found.get("total_s") or 0.0)
    buckets = {str(k): float(v) for k, v in (found.get("buckets_s") or {}).items()}
    if total_s <= 0 or not buckets:
        return []
    pending_s = float(found.get("pending_s") or 0.0)
    still_s = min(float(found.get("no_step_s") or 0.0), pending_s) if frame.stalled(found) else 0.0
    rows = [(LEDGER_WORDS["productive"], buckets.pop("productive", 0.0) + pending_s - still_s)]
    rows += [("no step completed (slow step, or a hang)", still_s)] * (still_s > 0)
    rows += [
        (LEDGER_WORDS.get(name, name), spent)
        for name, spent in sorted(buckets.items(), key=lambda item: -item[1])
        if spent > 0
    ]
    width = max(len(name) for name, _ in rows)
    return [f"{name:{width}}  {seconds(s):>10}  {part(s / total_s):>8}" for name, s in rows]

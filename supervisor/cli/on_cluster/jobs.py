"""`holdfast jobs`: list the supervised jobs of one namespace or of all namespaces."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from holdfast.errors import BadInput
from holdfast.fileio.strict_json import mapping
from supervisor.cli import command_options
from supervisor.cli.api_client import AGED_S, age_of, is_current, outdated
from supervisor.cli.on_cluster.connection import NOT_INSTALLED, ClusterConnection
from supervisor.cli.on_cluster.resource import recent_of, view_of
from supervisor.cluster.supervision.contents import SUPERVISIONS
from supervisor.display import frame
from supervisor.display.screen import say, say_all, say_json
from supervisor.kubernetes.client import KubernetesObject
from supervisor.kubernetes.errors import NotFound
from supervisor.observability.incident_record import SCHEMA
from supervisor.wording import count, ettr, seconds, table, what

_RIGHT = frozenset({3, 4, 5, 6, 7})


def show(connection: ClusterConnection, command: command_options.Jobs) -> int:
    """List the jobs and return the exit code. Raises `BadInput` if Holdfast is not installed."""
    namespace = "" if command.all_namespaces else command.namespace or connection.namespace
    try:
        found = connection.ask(lambda server: server.list(SUPERVISIONS, namespace, prune=_row_only))
    except NotFound:
        raise BadInput(NOT_INSTALLED) from None
    rows = sorted((each["row"] for each in found.objects), key=lambda row: (row["namespace"], row["name"]))
    now_s = time.time()
    if command.json:
        say_json([_with_age(each, now_s) for each in rows])
    elif rows:
        say_all(lines(rows, now_s, with_namespace=command.all_namespaces))
    elif namespace:
        say(f"no jobs in namespace {namespace!r}: `holdfast jobs -A` lists the jobs of all namespaces")
    else:
        say("no jobs on this cluster: run `holdfast doctor` to find out why a pod is not supervised")
    return 0


def _row_only(found: KubernetesObject) -> KubernetesObject:
    """Keep only a job's row, because the states and statuses of hundreds of jobs occupy many megabytes."""
    return {"row": row_of(found)}


def row_of(found: KubernetesObject) -> dict[str, Any]:
    """Return a job as `holdfast jobs --json` lists it."""
    metadata, spec, summary = found["metadata"], mapping(found.get("spec")), mapping(found.get("status"))
    view, recent = view_of(found) or {}, recent_of(found)
    opened = view.get("open_incident")
    last = opened if isinstance(opened, dict) else recent[-1] if recent else None
    return {
        "schema": SCHEMA,
        "namespace": metadata["namespace"],
        "name": metadata["name"],
        "kind": mapping(spec.get("owner")).get("kind"),
        "members": spec.get("members"),
        "nproc_per_node": spec.get("nprocPerNode"),
        "phase": summary.get("phase"),
        "generation": summary.get("generation"),
        "step": summary.get("step"),
        "ettr": view.get("ettr"),
        "incidents": summary.get("incidents") or 0,
        "standbys": dict(mapping(summary.get("standbys"))) or None,
        "last_incident": f"{last.get('id')}: {what(last)}" if last else None,
        "exit_code": view.get("exit_code"),
        "created": seconds_of(metadata.get("creationTimestamp")),
        "updated": view.get("updated"),
    }


def _with_age(row: Mapping[str, Any], now_s: float) -> dict[str, Any]:
    return {**row, "age_s": age_of(row, now_s), "current": is_current(row, now_s)}


def seconds_of(timestamp: object) -> float | None:
    """Return a Kubernetes timestamp in seconds since the epoch; None if it is invalid."""
    try:
        return datetime.fromisoformat(str(timestamp).replace("Z", "+00:00")).timestamp()
    except ValueError:
        return None


def lines(rows: Sequence[Mapping[str, Any]], now_s: float, *, with_namespace: bool) -> list[str]:
    """Return the output of `holdfast jobs`. `now_s` is the time in seconds since the epoch."""
    head = ("NAMESPACE", "NAME", "KIND", "RANKS", "STANDBYS", "STEP", "ETTR", "AGE", "PHASE", "LAST INCIDENT")
    cells = [
        (
            str(row["namespace"]),
            str(row["name"]),
            str(row["kind"] or "-"),
            _ranks(row),
            str((row["standbys"] or {}).get("summary") or "-"),
            f"{row['step']:,}" if isinstance(row["step"], int) else "-",
            _ettr(row),
            seconds(max(0.0, now_s - row["created"])) if row["created"] is not None else "-",
            _phase(row, now_s),
            _last(row),
        )
        for row in rows
    ]
    old = [age_of(row, now_s) or 0.0 for row in rows if is_current(row, now_s) is False]
    of_jobs = count(len(old), "job") if len(old) < len(rows) else "all jobs"
    warning = [f"warning: {outdated(of_jobs, min(old))}"] if old else []
    left_out = {0} if not with_namespace else set[int]()
    if not any(row["standbys"] for row in rows):
        left_out.add(head.index("STANDBYS"))
    shown = [number for number in range(len(head)) if number not in left_out]
    right = frozenset(place for place, number in enumerate(shown) if number in _RIGHT)
    texts = [tuple(each[number] for number in shown) for each in cells]
    return [*table(tuple(head[number] for number in shown), texts, right), *warning]


def _ranks(row: Mapping[str, Any]) -> str:
    counts = (row["members"], row["nproc_per_node"])
    return f"{counts[0]} x {counts[1]}" if all(isinstance(each, int) for each in counts) else "-"


def _ettr(row: Mapping[str, Any]) -> str:
    if row["updated"] is None:  # there is no status
        return "-"
    return ettr(row["ettr"])


def _phase(row: Mapping[str, Any], now_s: float) -> str:
    if row["phase"] is None:
        return "not taken over yet"
    if row["phase"] == "ended" and row["exit_code"] is not None:
        return f"ended with exit code {row['exit_code']}"
    name, age_s = frame.phase({**row, "step": 0}), age_of(row, now_s) or 0.0
    return f"{name}, {seconds(age_s)} ago" if age_s >= AGED_S and row["phase"] != "ended" else name


def _last(row: Mapping[str, Any]) -> str:
    total, last = row["incidents"], row["last_incident"]
    return f"{last} ({total} in all)" if last and total > 1 else str(last or "-")

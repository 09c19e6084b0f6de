"""`holdfast nodes`: show which nodes are quarantined and why, and request a quarantine or a release.

Everything is read from the Node objects, so this works even if no supervisor is running. A request is an
annotation on the Node, which the supervisor carries out and removes.
"""

from __future__ import annotations

import difflib
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.errors import BadInput
from holdfast.protocol.foreign_text import one_line
from supervisor.admission import pod_layout
from supervisor.cli import command_options
from supervisor.cli.on_cluster.connection import ClusterConnection, denial
from supervisor.cli.on_cluster.jobs import seconds_of
from supervisor.display.screen import say, say_all, say_json
from supervisor.kubernetes.client import CONFIG_MAPS, NODES, ResourceKind
from supervisor.kubernetes.errors import Conflict, Forbidden, NotFound, ServerUnreachable
from supervisor.kubernetes.lease import LEASES
from supervisor.nodes import node_objects, settings, summary
from supervisor.nodes.names import CONFIG, REQUEST, REQUESTED_BY
from supervisor.nodes.node_objects import KnownNode, OperatorRequest
from supervisor.nodes.settings import BadSettings, QuarantineSettings
from supervisor.nodes.summary import NodePool
from supervisor.wording import count, seconds, table

SELF_REVIEWS = ResourceKind("authentication.k8s.io", "v1", "selfsubjectreviews", namespaced=False)
CARRY_OUT_S = 15.0  # the leader carries out a request within a second
READ_S = 0.5
_SHOWN = 60  # characters of a finding in the table


def show(connection: ClusterConnection, command: command_options.Nodes) -> int:
    """Carry out `holdfast nodes`, and return the exit code. Raises `BadInput` for an unknown node."""
    if command.action in ("release", "quarantine"):
        return _request(connection, command)
    notes: list[str] = []
    in_force = _settings(connection, notes)
    nodes = _read(connection)
    now_s = time.time()
    pool = summary.pool_of([(each, _age_s(each, now_s)) for each in nodes], in_force, now_s)
    notes += _dry_run(connection, in_force, now_s)
    as_json = command.json or command.output == "json"
    if command.action == "explain":
        return _explain(pool, nodes, command.node, as_json)
    rows = [summary.row_of(pool, name) for name in sorted(pool.views)]
    if as_json:
        say_json(rows)
    elif not rows:
        say("no node has an agent: install the node agent to monitor the health of the nodes")
    else:
        say_all([*lines(rows, now_s), *footer(pool, len(nodes) - len(rows)), *map(one_line, notes)])
    return 0


# -- reading


def _read(connection: ClusterConnection) -> list[KnownNode]:
    listed = connection.ask(lambda server: server.list(NODES, prune=node_objects.prune))
    return [node_objects.read(each) for each in listed.objects]


def _age_s(node: KnownNode, now_s: float) -> float:
    """Return the age of the node's report according to its own timestamp; infinite if it has none."""
    written_s = seconds_of(node.report_at)
    return math.inf if written_s is None else max(0.0, now_s - written_s)


def _settings(connection: ClusterConnection, notes: list[str]) -> QuarantineSettings:
    """Return the settings, or the defaults with a note that says why they are shown."""
    try:
        found = connection.ask(lambda server: server.get(CONFIG_MAPS, CONFIG, pod_layout.NAMESPACE))
        return settings.parse(found.get("data") or {})
    except NotFound:
        return QuarantineSettings()
    except Forbidden as error:
        notes.append(f"note: computed with the default settings, because {denial(error)}")
    except BadSettings as error:
        notes.append(f"warning: the ConfigMap {CONFIG} is invalid: {error}")
    return QuarantineSettings()


def _dry_run(connection: ClusterConnection, found: QuarantineSettings, now_s: float) -> list[str]:
    """Return a line that says why actions are not carried out; [] if they are."""
    installed_s: float | None = None
    if found.dry_run == settings.FIRST_HOUR:
        try:
            lease = connection.ask(
                lambda server: server.get(LEASES, pod_layout.SUPERVISOR_LEASE, pod_layout.NAMESPACE)
            )
        except NotFound:
            return ["note: no supervisor has led in this cluster yet, so nothing is carried out"]
        except Forbidden:
            return []
        installed_s = seconds_of(lease["metadata"].get("creationTimestamp"))
    if not found.is_dry(installed_s, now_s):
        return []
    until = ""
    if installed_s is not None:
        left_s = installed_s + settings.DRY_RUN_S - now_s
        until = f" for another {seconds(left_s)}, until the installation is one hour old"
    return [f"dry run: actions are only announced{until}"]


# -- the table


def lines(rows: Sequence[Mapping[str, Any]], now_s: float) -> list[str]:
    """Return the table that `holdfast nodes` prints."""
    head = ("NODE", "STATE", "SINCE", "FINDING", "NEXT", "WHY")
    cells = [
        (
            row["name"],
            _state(row),
            "-" if row["since"] is None else seconds(max(0.0, now_s - row["since"])),
            str(row["finding"] or "-")[:_SHOWN],
            row["next"] or "-",
            row["why"] or "-",
        )
        for row in rows
    ]
    return table(head, cells, frozenset({2}))


def _state(row: Mapping[str, Any]) -> str:
    more = [
        text
        for text, is_so in (
            ("draining", row["draining"]),
            ("cordoned", row["cordoned"]),
            ("not ready", not row["ready"]),
            ("alert", row["alert"]),
        )
        if is_so
    ]
    return f"{row['state']} ({', '.join(more)})" if more else str(row["state"])


def footer(pool: NodePool, others: int) -> list[str]:
    """Return the lines below the table, about all nodes."""
    found = [pool.breaker_line, *(each.why for each in pool.plan.holds if not each.node)]
    if others:
        found.append(f"not listed: {count(others, 'node')} without an agent")
    return list(map(one_line, found))


# -- one node


def _explain(pool: NodePool, nodes: Sequence[KnownNode], name: str, as_json: bool) -> int:
    _check_name(name, nodes)
    if name not in pool.views:
        raise BadInput(f"no agent has ever reported on node {name!r}, so nothing is known about its health")
    found = summary.explained(pool, name)
    if as_json:
        say_json(found)
    else:
        say_all(explanation(found, pool.now_s))
    return 0


def explanation(found: Mapping[str, Any], now_s: float) -> list[str]:
    """Return the output of `holdfast nodes explain`."""

    def ago(at_s: float) -> str:
        return f"{seconds(max(0.0, now_s - at_s))} ago"

    out = [f"{found['name']}: {_state(found)}"]
    if found["since"] is not None:
        by = f", by {found['by']}" if found["by"] else ""
        out.append(f"  since        {ago(found['since'])}{by}")
    shown = ("verdict", "decided", "next", "why", "request")
    out += [f"  {key:13}{found[key]}" for key in shown if found[key]]
    for each in found["findings"]:
        held = "" if each["held_s"] is None else f" for {seconds(each['held_s'])}"
        witnesses = ", ".join([*each["origins"], *each["backing"]]) or "an unnamed sensor"
        sure = "corroborated" if each["corroborated"] else "one witness"
        out.append(f"  finding      {each['key']}: {each['level']}{held}; seen by {witnesses} ({sure})")
    out += [f"  evidence     {each}" for each in found["evidence"]]
    out += [f"  blind        {each}" for each in found["blind"]]
    out += [
        f"  seen by run  {' '.join(filter(None, (ago(each['at']), each['device'], each['why'])))}"
        for each in found["runs"]
    ]
    for each in found["history"]:
        out.append(f"  history      {ago(each['at'])}: {each['action']}{', a relapse' * each['relapse']}")
    out.append(f"  lemon score  {found['lemon_score']}")
    if found["waiver"]:
        left_s = max(0.0, found["waiver"]["until"] - now_s)
        out.append(f"  waived       {ago(found['waiver']['at'])}, for another {seconds(left_s)}")
    out += [f"  release      when {each}" for each in found["release_needs"]]
    out += [f"  breaker      {found['breaker']}", *(f"  pool         {each}" for each in found["pool"])]
    return list(map(one_line, out))


def _check_name(name: str, nodes: Sequence[KnownNode]) -> None:
    known = [each.name for each in nodes]
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise BadInput(f"no node {name!r}: {hint}`kubectl get nodes` lists all nodes")


# -- requests


def _request(connection: ClusterConnection, command: command_options.Nodes) -> int:
    """Write the request on the Node, and wait until the supervisor has carried it out."""
    nodes = _read(connection)
    _check_name(command.node, nodes)
    node = next(each for each in nodes if each.name == command.node)
    if command.action == "release" and node.view.quarantine is None and not node.is_tainted:
        raise BadInput(f"node {node.name!r} is not quarantined, so there is nothing to release")
    request = OperatorRequest(command.action, command.why, command.drain)
    who = _user(connection)
    named = {REQUESTED_BY: who} if who else {}
    body = {"metadata": {"annotations": {REQUEST: node_objects.request_text(request), **named}}}
    connection.ask(lambda server: server.patch(NODES, node.name, body))
    return _await(connection, command)


def _user(connection: ClusterConnection) -> str:
    """Return the user's name from the API server; "" if the server cannot tell (before Kubernetes 1.28)."""
    body = {"apiVersion": SELF_REVIEWS.api_version, "kind": "SelfSubjectReview"}
    try:
        found = connection.ask(lambda server: server.create(SELF_REVIEWS, body))
    except (NotFound, Forbidden):
        return ""
    return str(((found.get("status") or {}).get("userInfo") or {}).get("username") or "")


def _await(connection: ClusterConnection, command: command_options.Nodes) -> int:
    deadline_s = time.monotonic() + CARRY_OUT_S
    while time.monotonic() < deadline_s:
        time.sleep(READ_S)
        try:
            found = connection.ask(lambda server: server.get(NODES, command.node))
        except NotFound:
            raise BadInput(f"node {command.node!r} was deleted in the meantime") from None
        except (ServerUnreachable, Conflict):
            continue  # the next read may succeed
        node = node_objects.read(node_objects.prune(found))
        if node.request is None:
            done = {"schema": summary.SCHEMA, "name": node.name, "carried_out": True, **node.last_decision}
            if command.json or command.output == "json":
                say_json(done)
            else:
                say(f"node {node.name}: {'quarantined' if node.view.quarantine else 'released'}")
            return 0
    say(
        f"node {command.node}: no supervisor has carried out the request within {CARRY_OUT_S:g} s;"
        " it remains on the node, and the next leader will carry it out"
    )
    return 1

"""Find out, before anything is created, whether the cluster has what its benches need."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.errors import BadInput
from supervisor.admission import pod_layout
from supervisor.cli.command_options import ClusterOptions
from supervisor.cli.on_cluster import diagnosis
from supervisor.cli.on_cluster.connection import NOT_INSTALLED, ClusterConnection, connected
from supervisor.cli.on_cluster.doctor import DEPLOYMENTS, SUPERVISOR, WEBHOOK, WEBHOOKS
from supervisor.cluster.supervision.contents import SUPERVISIONS
from supervisor.kubernetes.client import NODES, KubernetesObject, ResourceKind
from supervisor.kubernetes.errors import NotFound
from supervisor.wording import count

PYTORCH_JOBS = ResourceKind("kubeflow.org", "v1", "pytorchjobs")
_OPERATOR = (
    "install version 1 of Kubeflow's training operator: https://github.com/kubeflow/trainer/tree/release-1.9"
)


@dataclass(frozen=True, slots=True)
class FoundInstallation:
    """The objects that the bench needs, as found on the API server; None if an object does not exist."""

    knows_pytorch_jobs: bool
    knows_supervisions: bool
    webhook: KubernetesObject | None
    deployments: Mapping[str, KubernetesObject | None]  # by name


def problem(found: FoundInstallation) -> str:
    """Return what keeps annotated pods from being supervised, with the remedy; "" if nothing does."""
    if not found.knows_supervisions and found.webhook is None and not any(found.deployments.values()):
        return NOT_INSTALLED
    if not found.knows_supervisions:
        return f"the API server does not know {_name(SUPERVISIONS)}; {diagnosis.INSTALL}"
    examined = (
        diagnosis.webhook(found.webhook),
        *(diagnosis.deployment(name, each) for name, each in found.deployments.items()),
    )
    wrong = next((each for each in examined if each.state != "ok"), None)
    if wrong is not None:
        return f"{wrong.what}: {wrong.text}; {wrong.remedy}"
    if not found.knows_pytorch_jobs:
        return f"the API server does not know {_name(PYTORCH_JOBS)}; {_OPERATOR}"
    return ""


def check() -> None:
    """Check that kubectl is installed and that Holdfast is ready in the cluster that KUBECONFIG selects.

    Raises `BadInput` with one line that says what is missing. Changes nothing on the cluster, and takes at
    most a few seconds if the API server does not respond.
    """
    if shutil.which("kubectl") is None:
        raise BadInput(
            "bench cluster needs kubectl, which is not on PATH: https://kubernetes.io/docs/tasks/tools"
        )
    with connected(ClusterOptions()) as connection:
        wrong = problem(_find(connection))
    if wrong:
        raise BadInput(wrong)


def ready_nodes(least: int) -> list[str]:
    """Return the names of the nodes that are ready and accept pods.

    Raises `BadInput` if there are fewer than `least`.
    """
    with connected(ClusterOptions()) as connection:
        listed = connection.ask(lambda server: server.list(NODES))
    names = sorted(str(each["metadata"]["name"]) for each in listed.objects if takes_pods(each))
    if len(names) < least:
        raise BadInput(
            f"{count(len(names), 'node')} of the cluster {'is' if len(names) == 1 else 'are'} ready and"
            f" schedulable; expected at least {least}"
        )
    return names


def takes_pods(node: Mapping[str, Any]) -> bool:
    """Return True for a Node that is ready and not cordoned."""
    if (node.get("spec") or {}).get("unschedulable"):
        return False
    conditions = (node.get("status") or {}).get("conditions") or ()
    return any(each.get("type") == "Ready" and each.get("status") == "True" for each in conditions)


def _find(connection: ClusterConnection) -> FoundInstallation:
    def get(kind: ResourceKind, name: str, namespace: str = "") -> KubernetesObject | None:
        try:
            return connection.ask(lambda server: server.get(kind, name, namespace))
        except NotFound:
            return None

    return FoundInstallation(
        _is_known(connection, PYTORCH_JOBS),
        _is_known(connection, SUPERVISIONS),
        get(WEBHOOKS, WEBHOOK),
        {name: get(DEPLOYMENTS, name, pod_layout.NAMESPACE) for name in (WEBHOOK, SUPERVISOR)},
    )


def _is_known(connection: ClusterConnection, kind: ResourceKind) -> bool:
    try:
        connection.ask(lambda server: server.list(kind, connection.namespace, prune=lambda _: {}))
    except NotFound:
        return False
    return True


def _name(kind: ResourceKind) -> str:
    """Return the name of a kind, as kubectl writes it."""
    return f"{kind.plural}.{kind.group}"

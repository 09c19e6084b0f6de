"""Make a standby pod from a pod of the job. Pure.

A standby is a copy of a pod that the owner created and the webhook injected. It therefore has the same image,
command, volumes, resources, tolerations and spread. It differs in its identity, in what only its owner's
controller may set, in the nodes that it avoids, and in its priority, which yields to the users' pods.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from supervisor.admission import pod_layout
from supervisor.cluster.supervision.contents import KIND, SUPERVISIONS
from supervisor.kubernetes.client import KubernetesObject

# Labels by which a workload's controller, its Services and its disruption budgets find its pods. A standby
# that had them would answer under the name of the pod that it was copied from. Labels of the user remain.
_OWNERS_LABELS = (
    "batch.kubernetes.io/",
    "job-name",
    "controller-uid",
    "training.kubeflow.org/",
    "mpi-job-",
    "rank-index",
    "replica-index",
    "replica-type",
    "apps.kubernetes.io/",
    "statefulset.kubernetes.io/",
    "controller-revision-hash",
    "pod-template-hash",
    "jobset.sigs.k8s.io/",
    "leaderworkerset.sigs.k8s.io/",
    "elasticjob.dlrover/",
    "volcano.sh/task-",
    "ray.io/",
    "kueue.x-k8s.io/managed",
)
# What is written into annotations about one pod: its index, its addresses.
_OWNERS_ANNOTATIONS = (
    "batch.kubernetes.io/",
    "cni.projectcalico.org/",
    "k8s.v1.cni.cncf.io/network-status",
    "k8s.ovn.org/",
    "kubectl.kubernetes.io/",
)
# Fields of a pod's spec that the API server or a controller sets for one pod.
_OF_ONE_POD = (
    "nodeName",
    "hostname",
    "subdomain",
    "schedulingGates",
    "ephemeralContainers",
    "priority",
    "preemptionPolicy",
)
_TOKEN_VOLUME = "kube-api-access-"  # the API server adds such a volume to each pod
PRIORITY_CLASS = "holdfast-standby"
MAX_NAME = 63  # characters, because a pod's name is also its host name


@dataclass(frozen=True, slots=True)
class NoCopy:
    """No standby can be made from this pod. `why` says why, for users."""

    why: str


def standby_name(supervision: str, number: int) -> str:
    """Return the name of a job's standby. Two supervisors that create the same standby use the same name."""
    suffix = f"-standby-{number}"
    return supervision[: MAX_NAME - len(suffix)].rstrip("-.") + suffix


def standby_number(name: str) -> int:
    """Return the number in the name of a standby; 0 if the name has another form."""
    number = name.rpartition("-standby-")[2]
    return int(number) if number.isdecimal() and len(number) < 10 else 0


def standby_pod(
    model: KubernetesObject, supervision: str, supervision_uid: str, number: int, avoid: Iterable[str]
) -> dict[str, Any] | NoCopy:
    """Return the standby `number` of a job, as a copy of its pod `model`.

    Args:
        model: A pod of the job, as the API server returned it.
        supervision: The name of the job's Supervision, which owns the standby.
        supervision_uid: The uid of that Supervision.
        avoid: The nodes of the job's members.
    """
    metadata, spec = model["metadata"], copy.deepcopy(dict(model["spec"]))
    why = _only_for_one_pod(spec, metadata["name"])
    if why:
        return NoCopy(why)
    for name in _OF_ONE_POD:
        spec.pop(name, None)
    _drop_token(spec)
    spec["priorityClassName"] = PRIORITY_CLASS
    spec["affinity"] = _with_avoided(spec.get("affinity") or {}, sorted(set(avoid)))
    labels = _without(metadata.get("labels"), _OWNERS_LABELS)
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": standby_name(supervision, number),
            "namespace": metadata["namespace"],
            "labels": {**labels, pod_layout.STANDBY_OF: supervision[:MAX_NAME].rstrip("-.")},
            "annotations": _without(metadata.get("annotations"), _OWNERS_ANNOTATIONS),
            "ownerReferences": [
                {
                    "apiVersion": SUPERVISIONS.api_version,
                    "kind": KIND,
                    "name": supervision,
                    "uid": supervision_uid,
                    "controller": True,
                    "blockOwnerDeletion": False,
                }
            ],
        },
        "spec": spec,
    }


def _only_for_one_pod(spec: Mapping[str, Any], name: str) -> str:
    """Return which part of a pod no second pod can have; "" if there is none."""
    for volume in spec.get("volumes") or ():
        claim = (volume.get("persistentVolumeClaim") or {}).get("claimName", "")
        if claim == name or claim.endswith(f"-{name}"):  # from a StatefulSet's volumeClaimTemplates
            return f"the claim {claim} of volume {volume.get('name')} is only for pod {name}"
    for claim in spec.get("resourceClaims") or ():
        if claim.get("resourceClaimName"):
            return (
                f"the pod uses the ResourceClaim {claim['resourceClaimName']}, which no second pod may share:"
                " use a resourceClaimTemplateName"
            )
    return ""


def _drop_token(spec: dict[str, Any]) -> None:
    """Remove the volume with the token for the API server, which the API server adds again."""
    spec["volumes"] = [
        each for each in spec.get("volumes") or () if not str(each.get("name", "")).startswith(_TOKEN_VOLUME)
    ]
    for kind in ("initContainers", "containers"):
        for container in spec.get(kind) or ():
            mounts = container.get("volumeMounts") or ()
            container["volumeMounts"] = [
                each for each in mounts if not str(each.get("name", "")).startswith(_TOKEN_VOLUME)
            ]


def _with_avoided(affinity: Mapping[str, Any], nodes: list[str]) -> dict[str, Any]:
    """Return the affinity with these nodes excluded, from each alternative that the user allows."""
    if not nodes:
        return dict(affinity)
    excluded = [{"key": "metadata.name", "operator": "NotIn", "values": [each]} for each in nodes]
    node = dict(affinity.get("nodeAffinity") or {})
    required = dict(node.get("requiredDuringSchedulingIgnoredDuringExecution") or {})
    terms = required.get("nodeSelectorTerms") or [{}]
    required["nodeSelectorTerms"] = [
        {**term, "matchFields": [*(term.get("matchFields") or ()), *excluded]} for term in terms
    ]
    node["requiredDuringSchedulingIgnoredDuringExecution"] = required
    return {**affinity, "nodeAffinity": node}


def _without(found: Mapping[str, str] | None, prefixes: tuple[str, ...]) -> dict[str, str]:
    return {key: value for key, value in (found or {}).items() if not key.startswith(prefixes)}

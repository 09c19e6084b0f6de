"""Make a standby pod from a pod of the job. Pure.

A standby is a copy of a pod that the owner created and the webhook injected. It therefore has the same image,
command, volumes, resources, tolerations, spread and priority. It has its own identity, lacks what only the
owner's controller may set, and may use only certain nodes. It does not belong to the job's gang, because it
must neither complete the gang in place of a member nor wait for it.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from supervisor.admission import pod_layout
from supervisor.cluster.supervision.contents import KIND, SUPERVISIONS
from supervisor.kubernetes.client import KubernetesObject

# Labels by which a workload's controller, its Services and its disruption budgets find its pods. A standby
# that had them would be reachable under the name of the pod that it was copied from. The user's labels
# remain.
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
    # Gangs. Without these labels, the scheduler neither counts a standby among the pods that must start
    # together, nor makes it wait for the others:
    # https://scheduler-plugins.sigs.k8s.io/docs/plugins/coscheduling/ (the second is its former name)
    "scheduling.x-k8s.io/pod-group",
    "pod-group.scheduling.sigs.k8s.io",
    "volcano.sh/job-",
)
# Annotations about one pod, such as its index and its addresses.
_OWNERS_ANNOTATIONS = (
    "batch.kubernetes.io/",
    "cni.projectcalico.org/",
    "k8s.v1.cni.cncf.io/network-status",
    "k8s.ovn.org/",
    "kubectl.kubernetes.io/",
    # Gangs. For a pod without this annotation, Volcano makes a group of one pod in the pod's queue:
    # https://github.com/volcano-sh/volcano/blob/master/docs/design/multi-pod-management-and-scheduling.md
    "scheduling.k8s.io/group-name",
    "scheduling.volcano.sh/group-min-",
    "yunikorn.apache.org/task-group",  # https://yunikorn.apache.org/docs/user_guide/gang_scheduling
    "pod-group-name",  # NVIDIA's KAI scheduler
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
    "schedulingGroup",  # the gang in Kubernetes 1.36 and later, and in 1.35: KEP-4671
    "workloadRef",
)
_TOKEN_VOLUME = "kube-api-access-"  # the prefix of the volume that the API server adds to each pod
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_GANGS = (
    "scheduling.x-k8s.io/",
    "pod-group",
    "volcano.sh/job-",
    "scheduling.k8s.io/group-name",
    "yunikorn.apache.org/",
)
MAX_NAME = 63  # characters, because a pod's name is also its host name
HASH = 8  # characters


@dataclass(frozen=True, slots=True)
class NoCopy:
    """No standby can be made from this pod. `why` says why, for users."""

    why: str


def standby_name(supervision: str, supervision_uid: str, number: int) -> str:
    """Return the name of a job's standby. Two supervisors that create the same standby use the same name.

    A name that must be shortened contains a hash of the Supervision's uid, because the long names of a user's
    jobs often differ only at their end.
    """
    suffix = f"-standby-{number}"
    if len(supervision) + len(suffix) > MAX_NAME:
        suffix = f"-{hashlib.sha256(supervision_uid.encode()).hexdigest()[:HASH]}{suffix}"
    return supervision[: MAX_NAME - len(suffix)].rstrip("-.") + suffix


def standby_number(name: str) -> int:
    """Return the number in the name of a standby; 0 if the name has another form."""
    number = name.rpartition("-standby-")[2]
    return int(number) if number.isdecimal() and len(number) < 10 else 0


def standby_pod(
    model: KubernetesObject, supervision: str, supervision_uid: str, number: int, queue: str = ""
) -> dict[str, Any] | NoCopy:
    """Return the standby `number` of a job: a copy of its pod `model`, not yet limited to certain nodes.

    Args:
        model: A pod of the job, as the API server returned it.
        supervision: The name of the job's Supervision, which owns the standby.
        supervision_uid: The uid of that Supervision.
        queue: The label of an owner by which Kueue admits the job; "" if there is none.
    """
    metadata = model["metadata"]
    if why := _of_kueue(metadata, queue) or _only_for_one_pod(model["spec"], metadata["name"]):
        return NoCopy(why)
    return copy_of(model, standby_name(supervision, supervision_uid, number), supervision, supervision_uid)


def copy_of(model: KubernetesObject, name: str, supervision: str, supervision_uid: str) -> dict[str, Any]:
    """Return a copy of the pod `model`, named `name`, that belongs to a Supervision and to nothing else."""
    metadata, spec = model["metadata"], copy.deepcopy(dict(model["spec"]))
    for name_of_field in _OF_ONE_POD:
        spec.pop(name_of_field, None)
    _drop_token(spec)
    if pod_layout.STANDBY_OF in (metadata.get("labels") or {}):
        spec["affinity"] = _without_names(spec.get("affinity") or {})
    labels = _without(metadata.get("labels"), _OWNERS_LABELS)
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
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
    """Return why a pod cannot be copied, because a part of it is only for one pod; "" if it can."""
    for volume in spec.get("volumes") or ():
        claim = (volume.get("persistentVolumeClaim") or {}).get("claimName", "")
        if claim == name or claim.endswith(f"-{name}"):  # from a StatefulSet's volumeClaimTemplates
            return f"the claim {claim} of volume {volume.get('name')} is only for pod {name}"
    for claim in spec.get("resourceClaims") or ():
        if claim.get("resourceClaimName"):
            return (
                f"the pod uses the ResourceClaim {claim['resourceClaimName']}, which a second pod cannot"
                " share: use a resourceClaimTemplateName"
            )
    return ""


def _of_kueue(metadata: Mapping[str, Any], queue: str) -> str:
    """Return why a pod that Kueue admits is not copied; "" if Kueue does not admit it.

    Kueue admits the pods of a job as one Workload, within the quota of a queue. An additional pod is outside
    the Workload, and Kueue deletes pods in excess of a pod group:
    https://kueue.sigs.k8s.io/docs/tasks/run/plain_pods/
    """
    stated = (*(metadata.get("labels") or ()), *(metadata.get("annotations") or ()))
    name = queue or next((each for each in sorted(stated) if each.startswith(pod_layout.KUEUE)), "")
    if not name:
        return ""
    return (
        f"Kueue admits the job's pods as one Workload ({name}), and an additional pod would be outside the"
        " Workload and its quota"
    )


def gangs_left(model: KubernetesObject, body: Mapping[str, Any]) -> list[str]:
    """Return the labels, annotations and fields that put `model`, but not its copy, into a gang."""
    found = []
    for part in ("labels", "annotations"):
        before, after = model["metadata"].get(part) or {}, body["metadata"][part]
        found += [each for each in before if each not in after and each.startswith(_GANGS)]
    return found + [each for each in ("schedulingGroup", "workloadRef") if each in model["spec"]]


def on_nodes(body: Mapping[str, Any], nodes: Iterable[str]) -> dict[str, Any]:
    """Return a standby that can only be scheduled on these nodes, within what the user allows."""
    spec = body["spec"]
    return {**body, "spec": {**spec, "affinity": _with_names(spec.get("affinity") or {}, sorted(set(nodes)))}}


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


def _with_names(affinity: Mapping[str, Any], nodes: list[str]) -> dict[str, Any]:
    """Return the affinity limited to these nodes, in each alternative that the user allows.

    The API server accepts one name for each requirement, so there is an alternative for each node.
    """
    named = [{"key": "metadata.name", "operator": "In", "values": [each]} for each in nodes]
    terms = _terms(affinity) or [{}]
    limited = [
        {**term, "matchFields": [*(term.get("matchFields") or ()), each]} for term in terms for each in named
    ]
    node = {**(affinity.get("nodeAffinity") or {}), _REQUIRED: {"nodeSelectorTerms": limited}}
    return {**affinity, "nodeAffinity": node}


def _without_names(affinity: Mapping[str, Any]) -> dict[str, Any]:
    """Return the affinity of a standby without the nodes to which `on_nodes` limited it."""
    terms: list[dict[str, Any]] = []
    for each in _terms(affinity):
        term = {key: value for key, value in each.items() if key != "matchFields"}
        if term not in terms:
            terms.append(term)
    node = {key: each for key, each in (affinity.get("nodeAffinity") or {}).items() if key != _REQUIRED}
    if terms and {} not in terms:
        node[_REQUIRED] = {"nodeSelectorTerms": terms}
    others = {key: each for key, each in affinity.items() if key != "nodeAffinity"}
    return {**others, "nodeAffinity": node} if node else others


def _terms(affinity: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    required = (affinity.get("nodeAffinity") or {}).get(_REQUIRED) or {}
    return list(required.get("nodeSelectorTerms") or ())


def _without(found: Mapping[str, str] | None, prefixes: tuple[str, ...]) -> dict[str, str]:
    return {key: value for key, value in (found or {}).items() if not key.startswith(prefixes)}

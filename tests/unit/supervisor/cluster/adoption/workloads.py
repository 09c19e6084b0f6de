"""Pods and their owners as the controllers create them, for the tests of job membership."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from supervisor.cluster.adoption import owner_size
from supervisor.cluster.adoption.job_membership import (
    Adopted,
    JobKey,
    NotAdopted,
    OwnerChain,
    OwnerReference,
    adopt,
    top_owner,
)
from supervisor.cluster.adoption.pod_facts import kept

Json = dict[str, Any]
OPTED_IN = {"metadata": {"annotations": {"holdfast.dev/inject": "true"}}}
NOT_OPTED_IN: Json = {"metadata": {}}
COMPLETION = "batch.kubernetes.io/job-completion-index"
TRAINING = "training.kubeflow.org/"
DLROVER = "elasticjob.dlrover/"
LWS = "leaderworkerset.sigs.k8s.io/"
JOBSET = "jobset.sigs.k8s.io/"


def made(api_version: str, kind: str, name: str, spec: Json | None = None, by: Json | None = None) -> Json:
    """Return an object as the API server sends it. `by` is its controller."""
    metadata: Json = {"name": name, "namespace": "team", "uid": f"uid-{kind.lower()}-{name}"}
    if by is not None:
        metadata["ownerReferences"] = [reference_to(by)]
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, "spec": spec or {}}


def reference_to(owner: Json) -> Json:
    metadata = owner["metadata"]
    return {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": metadata["name"],
        "uid": metadata["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }


def pod(
    name: str,
    by: Json | None = None,
    labels: Json | None = None,
    annotations: Json | None = None,
    env: Json | None = None,
    nproc: int = 4,
    members: object = None,
) -> Json:
    """Return a pod that the webhook has injected. `members` is the number in its command."""
    found = made("v1", "Pod", name, by=by)
    written = {"version": "0.9", "container": "train", "nproc": nproc, "members": members, "digest": "12ab"}
    found["metadata"]["labels"] = labels or {}
    found["metadata"]["annotations"] = {
        "holdfast.dev/inject": "true",
        "holdfast.dev/injected": json.dumps(written),
        **(annotations or {}),
    }
    variables = [variable(key, value) for key, value in (env or {}).items()]
    found["spec"] = {
        "initContainers": [{"name": "holdfast-sidecar", "restartPolicy": "Always"}],
        "containers": [{"name": "logs"}, {"name": "train", "env": variables}],
    }
    found["status"] = {"phase": "Running"}
    return found


def variable(name: str, value: str) -> Json:
    if value.startswith("metadata."):
        return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": value}}}
    return {"name": name, "value": value}


def chain(of: Json, *objects: Mapping[str, Any]) -> OwnerChain:
    """Return the owners of a pod on a cluster that has these objects."""
    found = {tuple(key_of(each)): each for each in objects}
    return top_owner(of, found.get)


def key_of(owner: Mapping[str, Any]) -> OwnerReference:
    metadata = owner["metadata"]
    return OwnerReference(
        owner["apiVersion"], owner["kind"], metadata["namespace"], metadata["name"], metadata["uid"]
    )


def adopted(of: Json, *objects: Json, group: tuple[Json, ...] = ()) -> Adopted:
    """Return the result for a whole pod, which must also be that for what a mirror keeps of it."""
    found = adopt(of, chain(of, *objects), group)
    assert isinstance(found, Adopted), found
    stored = kept(of)
    owners = chain(stored, *map(owner_size.kept, objects))
    assert adopt(stored, owners, tuple(map(kept, group))) == found
    return found


def refused(of: Json, *objects: Json, group: tuple[Json, ...] = ()) -> str:
    found = adopt(of, chain(of, *objects), group)
    assert isinstance(found, NotAdopted), found
    if isinstance(of["metadata"], dict):  # the client refuses any other object
        stored = kept(of)
        assert isinstance(adopt(stored, chain(stored, *objects), tuple(map(kept, group))), NotAdopted)
    return found.why


def job_of(owner: Json, name: str = "") -> JobKey:
    reference = key_of(owner)
    return JobKey(
        "team", name or reference.name, reference.uid, reference.kind, reference.api_version, reference.name
    )


def kubeflow(kind: str, field: str, **replicas: int) -> Json:
    parts = {each: {"replicas": count, "template": OPTED_IN} for each, count in replicas.items()}
    return made("kubeflow.org/v1", kind, "llama", {field: parts})


def kubeflow_pod(owner: Json, replica_type: str, index: int, **env: str) -> Json:
    labels = {
        f"{TRAINING}job-name": owner["metadata"]["name"],
        f"{TRAINING}operator-name": f"{owner['kind'].lower()}-controller",
        f"{TRAINING}replica-type": replica_type,
        f"{TRAINING}replica-index": str(index),
    }
    return pod(f"{owner['metadata']['name']}-{replica_type}-{index}", owner, labels, env=env)


def kueue_pod(name: str, index: str, count: str = "3") -> Json:
    labels = {
        "kueue.x-k8s.io/queue-name": "gpus",
        "kueue.x-k8s.io/managed": "true",
        "kueue.x-k8s.io/pod-group-name": "llama",
        "kueue.x-k8s.io/pod-group-pod-index": index,
    }
    return pod(name, None, labels, {"kueue.x-k8s.io/pod-group-total-count": count})


def put(raw: Any, path: str, value: object) -> None:
    """Set the value at a path of keys and list positions, joined by dots."""
    *above, last = path.split(".")
    for name in above:
        raw = raw[int(name)] if isinstance(raw, list) else raw[name]
    if isinstance(raw, list):
        raw[int(last)] = value
    else:
        raw[last] = value

"""The objects of the simulated cluster: Jobs, and their pods as the webhook and the kubelet leave them. Pure.

The real injector makes the pods from an ordinary template, so they look just like those that the supervisor
reads on a cluster.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from holdfast.version import __version__
from supervisor.admission import pod_layout
from supervisor.admission.injection import Injected, InjectionContext, inject

NAMESPACE = "team"
MAX_MEMBERS = 4096  # of one job
COMPLETION = "batch.kubernetes.io/job-completion-index"
TOKEN = "bench.{uid}.signature"  # the token of a pod; only the simulated API server accepts it
_CREATED = "2026-01-01T00:00:00Z"

Json = dict[str, Any]


def job_name(number: int) -> str:
    return f"train-{number:04d}"


def pod_uid(number: int, index: int) -> str:
    return f"{number:04x}{index:04x}-0000-4000-8000-{number:06d}{index:06d}"


def token_of(uid: str) -> str:
    return TOKEN.format(uid=uid)


def uid_of(token: str) -> str:
    """Return the pod's UID in a token; "" for any other text."""
    head, _, rest = token.partition(".")
    uid, _, tail = rest.rpartition(".")
    return uid if (head, tail) == ("bench", "signature") else ""


def workloads(jobs: int, members: int, nproc: int) -> Iterator[tuple[Json, list[Json]]]:
    """Yield each Job with its pods. `members` pods in total are divided evenly among the jobs."""
    context = InjectionContext("holdfast:dev", __version__, ca="-" * 700, namespace=NAMESPACE)
    for number in range(jobs):
        count = members // jobs + (number < members % jobs)
        owner = _job(number, count)
        found = inject(_template(owner, nproc), context)
        assert isinstance(found, Injected), found
        yield owner, [_pod(found.pod, owner, number, index) for index in range(count)]


def _job(number: int, completions: int) -> Json:
    uid = f"{number:08x}-1000-4000-8000-000000000000"
    metadata = {"name": job_name(number), "namespace": NAMESPACE, "uid": uid, "creationTimestamp": _CREATED}
    spec = {"completionMode": "Indexed", "completions": completions, "parallelism": completions}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}


def _template(owner: Json, nproc: int) -> Json:
    name, uid = owner["metadata"]["name"], owner["metadata"]["uid"]
    trainer = {
        "name": "trainer",
        "image": "registry.example.com/research/trainer:2026-01",
        "command": ["torchrun", f"--nproc-per-node={nproc}", "train.py"],
        "env": [
            {"name": f"TRAINING_OPTION_{at}", "value": "a value of the usual length"} for at in range(12)
        ],
        "resources": {
            "limits": {"memory": "512Gi", "cpu": "64"},
            "requests": {"memory": "512Gi", "cpu": "64"},
        },
        "volumeMounts": [{"name": "data", "mountPath": "/data"}],
    }
    reference = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "name": name,
        "uid": uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }
    metadata = {
        "generateName": f"{name}-",
        "namespace": NAMESPACE,
        "labels": {"app": name, "batch.kubernetes.io/job-name": name},
        "annotations": {pod_layout.INJECT: "true"},
        "ownerReferences": [reference],
    }
    volumes = [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}]
    spec = {"restartPolicy": "Never", "containers": [trainer], "volumes": volumes}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def _pod(injected: Any, owner: Json, number: int, index: int) -> Json:
    made: Json = copy.deepcopy(injected)
    uid = pod_uid(number, index)
    metadata = made["metadata"]
    metadata.pop("generateName")
    metadata |= {
        "name": f"{owner['metadata']['name']}-{index}-abcde",
        "uid": uid,
        "creationTimestamp": _CREATED,
    }
    metadata["labels"] = {**metadata["labels"], COMPLETION: str(index)}
    metadata["annotations"] = {**metadata["annotations"], COMPLETION: str(index)}
    made["spec"]["nodeName"] = node_name(number, index)
    started = {"startedAt": _CREATED}
    statuses = [
        {
            "name": each["name"],
            "state": {"running": started},
            "ready": True,
            "restartCount": 0,
            "containerID": f"containerd://{uid.replace('-', '') * 2}",
        }
        for each in made["spec"]["containers"]
    ]
    made["status"] = {"phase": "Running", "podIP": pod_address(number, index), "containerStatuses": statuses}
    return made


def node_name(number: int, index: int) -> str:
    return f"node-{number:04d}-{index:02d}"


def pod_address(number: int, index: int) -> str:
    host = number * MAX_MEMBERS + index + 1  # below 2**24, as there are at most 250 jobs with so many members
    return f"10.{host >> 16 & 255}.{host >> 8 & 255}.{host & 255}"

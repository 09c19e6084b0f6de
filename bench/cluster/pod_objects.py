"""The objects of the cluster benches: a script in a ConfigMap, and pods that train it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

IMAGE = "holdfast-trainer:dev"
LIBRARY_IMAGE = "holdfast:dev"  # provides the package holdfast to the pods that are not annotated
CONTAINER = "pytorch"  # the operator requires this name


def script(path: Path) -> dict[str, Any]:
    """Return a ConfigMap with a script, which `pod` mounts as /script/train.py."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "script"},
        "data": {"train.py": path.read_text()},
    }


def pytorch_job(name: str, pods: int, template: Mapping[str, Any], restart: str) -> dict[str, Any]:
    """Return a PyTorchJob of `pods` pods with one rank each. `restart` is their restart policy."""
    replicas = {"replicas": 1, "restartPolicy": restart, "template": template}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": name},
        "spec": {
            "nprocPerNode": "1",
            "pytorchReplicaSpecs": {"Master": replicas, "Worker": {**replicas, "replicas": pods - 1}},
        },
    }


def pod(
    command: Sequence[str], *, annotated: bool, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return the spec of a pod. If it is not `annotated`, it gets the library from an init container."""
    given = {"OMP_NUM_THREADS": "1", **(environment or {})}
    trainer: dict[str, Any] = {
        "name": CONTAINER,
        "image": IMAGE,
        "imagePullPolicy": "IfNotPresent",
        "command": list(command),
        "env": [{"name": name, "value": value} for name, value in given.items()],
        "resources": {"requests": {"cpu": "200m", "memory": "512Mi"}, "limits": {"memory": "1Gi"}},
        "volumeMounts": [{"name": "script", "mountPath": "/script"}],
    }
    spec: dict[str, Any] = {
        "securityContext": {"runAsUser": 1000, "runAsNonRoot": True},
        "containers": [trainer],
        "volumes": [{"name": "script", "configMap": {"name": "script"}}],
    }
    if not annotated:
        library = {"name": "library", "mountPath": "/opt/holdfast"}
        spec["initContainers"] = [
            {
                "name": "library",
                "image": LIBRARY_IMAGE,
                "imagePullPolicy": "IfNotPresent",
                "args": ["holdfast", "install-runtime", "/opt/holdfast"],
                "volumeMounts": [library],
            }
        ]
        spec["volumes"].append({"name": "library", "emptyDir": {}})
        trainer["volumeMounts"].append(library)
        trainer["env"].append({"name": "PYTHONPATH", "value": "/opt/holdfast/lib"})
    return spec

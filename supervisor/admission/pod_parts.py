"""Define the containers, volumes, mounts and variables that are added to an injected pod. Pure.

This module also contains the functions that read a pod as JSON and add parts to it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from holdfast.protocol import environment
from supervisor.admission import pod_layout, resources
from supervisor.admission.resources import OwnResources
from supervisor.admission.settings import PodSettings
from supervisor.controller import policy_options

PodObject: TypeAlias = dict[str, Any]  # a pod, a pod template, or a part of either, as JSON

_RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}


@dataclass(frozen=True, slots=True)
class InjectionContext:
    """The inputs of an injection other than the pod.

    Attributes:
        image: The image of Holdfast's containers.
        version: The version of Holdfast that injects the pod.
        ca: The PEM text of the supervisor's CA; "" to omit it.
        supervisor_url: The URL where sidecars reach the supervisor.
        pull_policy: The pull policy of Holdfast's containers.
        namespace: The pod's namespace, which a pod that is being created may omit.
        operator_variables: Variables that an operator will add to the training container, as (name, value).
    """

    image: str
    version: str
    ca: str = ""
    supervisor_url: str = pod_layout.SUPERVISOR_URL
    pull_policy: str = "IfNotPresent"
    namespace: str = ""
    operator_variables: tuple[tuple[str, str], ...] = ()


DEFAULT_GRACE_S = 30  # Kubernetes' default time between SIGTERM and SIGKILL
MAX_GRACE_S = 7 * 86_400
END_S = 5  # the part of the grace period that is reserved for the ranks to end


@dataclass(frozen=True, slots=True)
class PodAdditions:
    """Everything that is added to a pod. The mounts and variables are for the training container."""

    containers: tuple[PodObject, ...]
    volumes: tuple[PodObject, ...]
    mounts: tuple[PodObject, ...]
    variables: tuple[PodObject, ...]


class MalformedPod(ValueError):
    """A part of a pod does not have the type that the API defines. The message names the part."""


def additions(
    context: InjectionContext,
    asked: PodSettings,
    user: Mapping[str, Any],
    own: OwnResources,
    volume_bytes: int,
    nproc: int,
    leave_s: int,
) -> PodAdditions:
    """Return everything to add to a pod.

    Args:
        context: The image, version and addresses to use.
        asked: The pod's settings.
        user: The security context fields that set the user of Holdfast's containers.
        own: The resources of Holdfast's containers.
        volume_bytes: The size of the memory volume.
        nproc: The number of ranks in the pod.
        leave_s: How long the pod has to secure its state when it is deleted.
    """
    checkpoints = {"name": pod_layout.CHECKPOINT_VOLUME, "mountPath": pod_layout.CHECKPOINT_DIRECTORY}
    if asked.checkpoints.claim and asked.checkpoints.path:
        checkpoints["subPath"] = asked.checkpoints.path
    code = {"name": pod_layout.CODE_VOLUME, "mountPath": pod_layout.CODE}
    memory = {"name": pod_layout.MEMORY_VOLUME, "mountPath": pod_layout.MEMORY}
    identity = {"name": pod_layout.IDENTITY_VOLUME, "mountPath": pod_layout.IDENTITY, "readOnly": True}
    setup = _container(context, pod_layout.SETUP, pod_layout.SETUP_ARGS, user, own.setup)
    sidecar = _container(context, pod_layout.SIDECAR, pod_layout.SIDECAR_ARGS, user, own.sidecar)
    setup["volumeMounts"] = [code]
    sidecar["env"] += _sidecar_variables(context, asked, nproc)
    sidecar["volumeMounts"] = [memory, identity, checkpoints]
    if asked.checkpoints_secret:  # the variables in `env` take precedence over the keys of the Secret
        sidecar["envFrom"] = [{"secretRef": {"name": asked.checkpoints_secret}}]
    sidecar["livenessProbe"] = copy.deepcopy(pod_layout.ALIVE_PROBE)
    sidecar["restartPolicy"] = "Always"  # makes the init container run as long as the pod
    return PodAdditions(
        (setup, sidecar),
        _volumes(asked, volume_bytes),
        ({**code}, {**memory}, {**checkpoints}),
        _training_variables(asked, nproc, leave_s),
    )


def _container(
    context: InjectionContext,
    name: str,
    args: Sequence[str],
    user: Mapping[str, Any],
    own: Mapping[str, Mapping[str, str]],
) -> PodObject:
    no_gpus, void = pod_layout.NO_GPUS
    found: PodObject = {
        "name": name,
        "image": context.image,
        "imagePullPolicy": context.pull_policy,
        "args": list(args),
        "env": [{"name": no_gpus, "value": void}],
        "securityContext": {**user, **_RESTRICTED},
    }
    if own:
        found["resources"] = {kind: dict(amounts) for kind, amounts in own.items()}
    return found


def _sidecar_variables(context: InjectionContext, asked: PodSettings, nproc: int) -> list[PodObject]:
    values = {
        environment.MEMBER: pod_layout.MEMBER,
        environment.NODE: f"$({pod_layout.NODE_NAME})",
        environment.ADDRESS: f"$({pod_layout.POD_IP})",
        environment.NPROC: str(nproc),
        environment.DIRECTORY: pod_layout.MEMORY,
        environment.CHECKPOINTS: pod_layout.CHECKPOINT_DIRECTORY,
        environment.STORAGE: pod_layout.STORAGE_REPORTED,
        environment.SUPERVISOR: context.supervisor_url,
        environment.TOKEN_FILE: pod_layout.TOKEN_FILE,
        **({environment.OBJECTS: asked.checkpoints.objects} if asked.checkpoints.objects else {}),
        **({environment.CA: context.ca} if context.ca else {}),
        **policy_options.sidecar_environment(asked),
    }
    fields = [_from_field(name, field) for name, field in pod_layout.FIELDS.items()]
    return fields + [{"name": name, "value": value} for name, value in values.items()]


def leave_s(spec: Mapping[str, Any]) -> int:
    """Return how long a pod has to secure its state: its grace period minus the time for the ranks to end."""
    grace = spec.get("terminationGracePeriodSeconds")
    grace_s = grace if type(grace) is int and 0 <= grace <= MAX_GRACE_S else DEFAULT_GRACE_S
    return max(0, grace_s - END_S)


def _training_variables(asked: PodSettings, nproc: int, leave_s: int) -> tuple[PodObject, ...]:
    return (
        {"name": environment.FIRST_STEP_S, "value": str(asked.first_step_timeout_s)},
        {"name": environment.LEAVE_S, "value": str(leave_s)},
        {"name": environment.DIRECTORY, "value": pod_layout.MEMORY},
        {"name": environment.LOGS, "value": pod_layout.LOGS},
        _from_field(environment.MEMBER, pod_layout.FIELDS[pod_layout.POD_NAME]),
        {"name": environment.NPROC, "value": str(nproc)},
        _from_field(environment.BIND, pod_layout.FIELDS[pod_layout.POD_IP]),
        {"name": environment.PY_SPY, "value": pod_layout.PY_SPY},
    )


def _from_field(name: str, field: str) -> PodObject:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": field}}}


def _volumes(asked: PodSettings, volume_bytes: int) -> tuple[PodObject, ...]:
    storage: PodObject = {"emptyDir": {}}
    if asked.checkpoints.claim:
        storage = {"persistentVolumeClaim": {"claimName": asked.checkpoints.claim}}
    elif asked.checkpoints.path:
        storage = {"hostPath": {"path": asked.checkpoints.path, "type": "DirectoryOrCreate"}}
    token = {
        "audience": pod_layout.AUDIENCE,
        "expirationSeconds": pod_layout.TOKEN_S,
        "path": pod_layout.TOKEN,
    }
    memory = {"medium": "Memory", "sizeLimit": resources.size(volume_bytes)}
    return (
        {"name": pod_layout.CODE_VOLUME, "emptyDir": {}},
        {"name": pod_layout.MEMORY_VOLUME, "emptyDir": memory},
        {"name": pod_layout.IDENTITY_VOLUME, "projected": {"sources": [{"serviceAccountToken": token}]}},
        {"name": pod_layout.CHECKPOINT_VOLUME, **storage},
    )


def shorten_absence(spec: PodObject) -> None:
    """Make Kubernetes evict the pod 30 s after its node stops responding, unless the user set a toleration.

    Before the API server calls a webhook, it adds its default tolerations of 300 s. This function recognizes
    them by their exact content and shortens them.
    """
    tolerations = items(spec, "tolerations")
    for taint in pod_layout.AWAY_TAINTS:
        ours = {
            "key": taint,
            "operator": "Exists",
            "effect": "NoExecute",
            "tolerationSeconds": pod_layout.AWAY_S,
        }
        default = {**ours, "tolerationSeconds": pod_layout.DEFAULT_AWAY_S}
        about = [each for each in tolerations if _tolerates(each, taint)]
        if about == [default]:
            tolerations[tolerations.index(default)] = ours
        elif not about:
            tolerations.append(ours)
    spec["tolerations"] = tolerations


def _tolerates(toleration: Mapping[str, Any], taint: str) -> bool:
    """Return True if the toleration applies to this taint, or to all taints."""
    return (toleration.get("key") or taint) == taint and toleration.get("effect") in (
        None, "", "NoExecute"
    )  # fmt: skip


# -- reading a pod, and adding parts to it


def mapping(of: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return the object at `key`; {} if it is missing. Raises `MalformedPod`."""
    value = of.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise MalformedPod(f"{key} is not an object")
    return value


def items(of: Mapping[str, Any], key: str) -> list[PodObject]:
    """Return the list of objects at `key`, not a copy; [] if it is missing. Raises `MalformedPod`."""
    value = of.get(key)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise MalformedPod(f"{key} is not a list of objects")
    return value


def texts(of: Mapping[str, Any], key: str) -> list[str]:
    """Return the list of strings at `key`; [] if it is missing. Raises `MalformedPod`."""
    value = of.get(key)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise MalformedPod(f"{key} is not a list of strings: put each element in quotes")
    return value


def put(
    of: PodObject,
    key: str,
    wanted: Sequence[PodObject],
    identity: Callable[[PodObject], object],
    *,
    last: bool = False,
) -> None:
    """Put `wanted` into the list at `key`, replacing objects with the same identity. Append all others.

    With `last`, all objects in `wanted` move to the end. An existing object that covers the wanted one is
    kept, because the API server may have added defaults to it.
    """
    present = {identity(each): each for each in items(of, key)}
    chosen = {
        identity(each): present[identity(each)] if covers(present.get(identity(each)), each) else each
        for each in wanted
    }
    if last:
        of[key] = [each for each in items(of, key) if identity(each) not in chosen] + [*chosen.values()]
        return
    of[key] = [chosen.pop(identity(each), each) for each in items(of, key)] + [*chosen.values()]


def covers(present: object, wanted: object) -> bool:
    """Return True if `present` contains all of `wanted`. It can have more fields, mounts or variables."""
    if isinstance(present, Mapping) and isinstance(wanted, Mapping):
        return all(key in present and covers(present[key], value) for key, value in wanted.items())
    if isinstance(present, list) and isinstance(wanted, list) and any(isinstance(w, dict) for w in wanted):
        return all(any(covers(each, one) for each in present) for one in wanted)
    return type(present) is type(wanted) and present == wanted

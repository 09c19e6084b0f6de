"""Decide whether to inject Holdfast into a pod, and if so, add its containers and its launcher. Pure.

The result depends only on the pod and the context. Injection is idempotent, because the API server calls a
webhook again if another webhook has changed the pod. It does not change the user's fields, except for the
training container's command, and two tolerations if they have the cluster's default values.
"""

from __future__ import annotations

import copy
import hashlib
import json
import posixpath
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from holdfast import launch_commands
from holdfast.fileio import strict_json
from holdfast.protocol import environment
from supervisor.admission import pod_layout, pod_parts, resources, settings
from supervisor.admission.pod_parts import InjectionContext as InjectionContext
from supervisor.admission.pod_parts import MalformedPod, PodAdditions, PodObject
from supervisor.admission.resources import OwnResources
from supervisor.admission.settings import PodSettingsError
from supervisor.admission.training_command import NotUnderstood, TrainingCommand, understand

# Variables of the training container that Holdfast sets only if the user has not set them.
_USERS_OWN = (environment.LOGS, environment.BIND, environment.PY_SPY)
MAX_WHY = 1000  # characters
MAX_NOTED = 256 << 10  # bytes of annotations; the API server refuses a pod with more
_IN_THE_WAY = "a name that Holdfast needs: rename it"


@dataclass(frozen=True, slots=True)
class InjectionRecord:
    """What was injected into a pod, as recorded in its annotation `holdfast.dev/injected`.

    Attributes:
        version: The version of Holdfast that injected the pod.
        container: The name of the training container.
        nproc: The number of ranks in the pod.
        members: The number of pods in the group; None if only their owner specifies it.
        digest: A checksum of everything that was added.
    """

    version: str
    container: str
    nproc: int
    members: int | None
    digest: str = ""

    def text(self) -> str:
        return _compact(asdict(self))


@dataclass(frozen=True, slots=True)
class Injected:
    """The injected pod. `notes` are messages for the user, which kubectl shows as warnings."""

    pod: PodObject
    patch: list[dict[str, Any]]
    record: InjectionRecord
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Refused:
    """The pod without Holdfast. If there is room, an annotation says why it was not injected."""

    pod: PodObject
    patch: list[dict[str, Any]]
    why: str


@dataclass(frozen=True, slots=True)
class NotAsked:
    """The pod does not request Holdfast and is left unchanged."""


class _Unfit(Exception):
    """The pod cannot be injected. The message says why."""


def inject(pod: PodObject, context: InjectionContext) -> Injected | Refused | NotAsked:
    """Return the injected pod if the pod requests Holdfast and Holdfast can determine what it runs.

    This does not modify `pod`. A pod that cannot be injected gets an annotation that says why, and runs as it
    would without Holdfast. This function never raises, for any pod.
    """
    try:
        annotations = pod_parts.mapping(pod_parts.mapping(pod, "metadata"), "annotations")
    except MalformedPod:
        return NotAsked()
    asked = annotations.get(pod_layout.INJECT)
    if asked is None or asked == "false":
        return NotAsked()
    try:
        if asked != "true":
            raise _Unfit(
                f"{pod_layout.INJECT}: invalid value {asked!r}: expected 'true' or 'false' in quotes"
            )
        return _Injection(pod, context, annotations).result()
    except (_Unfit, MalformedPod, PodSettingsError) as error:
        return _refused(pod, annotations, str(error))
    except RecursionError:
        return _refused(pod, annotations, "the pod is nested too deeply")


def _refused(pod: PodObject, annotations: Mapping[str, str], why: str) -> Refused:
    """Return `pod`, annotated with the reason if there is room. The result shares its parts with `pod`."""
    if len(why) > MAX_WHY:
        why = f"{why[: MAX_WHY - 3]}..."
    after, noted = pod, {**annotations, pod_layout.NOT_INJECTED: why}
    if size_of(noted) <= MAX_NOTED:
        after = {**pod, "metadata": {**pod["metadata"], "annotations": noted}}
    return Refused(after, json_patch(pod, after), why)


def size_of(annotations: Mapping[str, str]) -> int:
    """Return the size of annotations in bytes, as the API server counts them."""
    texts = (each for pair in annotations.items() for each in pair if isinstance(each, str))
    return sum(len(each.encode(errors="replace")) for each in texts)


def record_of(annotations: Mapping[str, str]) -> InjectionRecord | None:
    """Return the record of the injection from a pod's annotations; None if the pod was not injected."""
    text = annotations.get(pod_layout.INJECTED)
    if not isinstance(text, str) or len(text) > pod_layout.MAX_INJECTED:
        return None
    try:
        read: Any = strict_json.loads(
            text.encode(errors="replace"), max_values=pod_layout.MAX_INJECTED_VALUES
        )
        found = InjectionRecord(**{each.name: read[each.name] for each in fields(InjectionRecord)})
    except (KeyError, TypeError, strict_json.RejectedJson):
        return None
    texts = (found.version, found.container, found.digest)
    counts = (found.nproc, 1 if found.members is None else found.members)
    is_valid = all(isinstance(each, str) for each in texts) and all(type(each) is int for each in counts)
    return found if is_valid and min(counts) > 0 else None


class _Injection:
    """Injects one pod. Methods raise `_Unfit` or `MalformedPod` if the pod cannot be injected."""

    def __init__(self, pod: PodObject, context: InjectionContext, annotations: Mapping[str, str]) -> None:
        self.before = pod
        self.context = context
        self.settings = settings.parse(annotations)
        self.pod = copy.deepcopy(pod)
        self.spec = pod_parts.mapping(self.pod, "spec")
        self.users = pod_parts.items(self.spec, "containers")
        _check_kind(self.spec, annotations, context)
        self.record = self._earlier(annotations)  # None if the pod is injected for the first time
        self.training = self._training_container()
        self.notes: tuple[str, ...] = ()

    def result(self) -> Injected:
        self._check_names()
        self._check_mounts()
        user = self._user()
        command, nproc, members = self._understand_command()
        volume_bytes = self._volume_bytes()
        own = self._plan_own_resources(volume_bytes)
        leave_s = pod_parts.leave_s(pod_parts.mapping(self.pod, "spec"))
        added = pod_parts.additions(self.context, self.settings, user, own, volume_bytes, nproc, leave_s)
        if command is not None:
            self._set_command(command)
        self._add(added, command)
        path = self.settings.checkpoints.path
        if path and not self.settings.checkpoints.claim and user.get("runAsUser") != 0:
            who = (
                f"user {user['runAsUser']}" if "runAsUser" in user else "the sidecar's user, who is not root,"
            )
            self.notes += (
                f"the kubelet creates {path} as root, so {who} cannot write checkpoints to it: create it"
                " on the node beforehand, writable by the training user",
            )
        if not self.settings.checkpoints.is_durable and self.settings.checkpoint_every_s:
            self.notes += (
                "no checkpoints are written, and the state is lost with the pods: to keep it, set"
                f" {pod_layout.CHECKPOINTS} to pvc://CLAIM or s3://BUCKET/PREFIX",
            )
        record = InjectionRecord(self.context.version, str(self.training.get("name", "")), nproc, members)
        record = replace(record, digest=_digest(record.text(), self.training["command"], asdict(added)))
        annotations = self.pod["metadata"]["annotations"]
        annotations.pop(pod_layout.NOT_INJECTED, None)
        annotations[pod_layout.INJECTED] = record.text()
        labels = pod_parts.mapping(self.pod["metadata"], "labels")
        self.pod["metadata"]["labels"] = {**labels, pod_layout.MEMBER_LABEL: pod_layout.IS_MEMBER}
        return Injected(self.pod, json_patch(self.before, self.pod), record, self.notes)

    def _earlier(self, annotations: Mapping[str, str]) -> InjectionRecord | None:
        """Return the record of an earlier injection, if the command still starts the launcher."""
        record = record_of(annotations)
        if record is None:
            return None
        found = [each for each in self.users if each.get("name") == record.container]
        return record if found and _starts_launcher(found[0]) else None

    def _training_container(self) -> PodObject:
        names = [str(each.get("name", "")) for each in self.users]
        wanted = self.record.container if self.record else self.settings.container
        if not wanted:
            candidates = [each for each in names if each not in pod_layout.PROXIES]
            if len(candidates) != 1:
                known = [each for each in candidates if each in pod_layout.TRAINING_NAMES]
                candidates = known if len(known) == 1 else self._with_accelerators(candidates)
            if len(candidates) != 1:
                raise _Unfit(
                    f"it is unclear which of the containers {', '.join(names)} trains:"
                    f" set {pod_layout.CONTAINER}"
                )
            wanted = candidates[0]
        if wanted not in names:
            raise _Unfit(
                f"{pod_layout.CONTAINER}: invalid value {wanted!r}: expected one of {', '.join(names)}"
            )
        return self.users[names.index(wanted)]

    def _with_accelerators(self, names: list[str]) -> list[str]:
        """Return the containers in `names` that have a GPU or another accelerator."""
        found, wanted = [], frozenset(names)
        for each in self.users:
            limits = pod_parts.mapping(pod_parts.mapping(each, "resources"), "limits")
            if str(each.get("name", "")) in wanted and any(
                key.endswith(pod_layout.ACCELERATORS) for key in limits
            ):
                found.append(str(each.get("name", "")))
        return found

    def _check_names(self) -> None:
        """Raise `_Unfit` if one of the user's containers or volumes has a name that Holdfast needs."""
        if self.record is not None:
            return
        for kind in ("containers", "initContainers", "ephemeralContainers"):
            for each in pod_parts.items(self.spec, kind):
                if each.get("name") in pod_layout.CONTAINERS:
                    raise _Unfit(f"the pod has a container {each['name']}, {_IN_THE_WAY}")
        for each in pod_parts.items(self.spec, "volumes"):
            if each.get("name") in pod_layout.VOLUMES:
                raise _Unfit(f"the pod has a volume {each['name']}, {_IN_THE_WAY}")

    def _check_mounts(self) -> None:
        """Raise `_Unfit` if the user has mounted a volume at or below one of Holdfast's paths."""
        for each in pod_parts.items(self.training, "volumeMounts"):
            path = posixpath.normpath("/" + str(each.get("mountPath", "")).lstrip("/"))
            is_ours = self.record is not None and pod_layout.TRAINING_MOUNTS.get(each.get("name", "")) == path
            for ours in pod_layout.TRAINING_MOUNTS.values():
                if not is_ours and (path == ours or path.startswith(ours + "/")):
                    raise _Unfit(f"the training container has a mount at {path}, a path that Holdfast needs")

    def _user(self) -> dict[str, Any]:
        """Return the security context fields that determine the user of Holdfast's containers.

        They run as the training user, which can write to the checkpoint storage. If the pod sets no user, the
        training image determines the user, which is not known here. Holdfast's containers then run as root,
        like most training images, but without capabilities. In a pod that must not run as root, they run as
        the user of Holdfast's image. Any two users can share the memory volume
        (`holdfast.fileio.folder_rights`).
        """
        own = pod_parts.mapping(self.training, "securityContext")
        of_pod = pod_parts.mapping(self.spec, "securityContext")
        effective = {**of_pod, **{key: value for key, value in own.items() if value is not None}}
        uid = effective.get("runAsUser")
        if uid is None and not effective.get("runAsNonRoot"):
            uid = 0
        found: dict[str, Any] = {"runAsUser": uid} if uid is not None else {}
        if effective.get("runAsGroup") is not None:
            found["runAsGroup"] = effective["runAsGroup"]
        if uid != 0 or of_pod.get("runAsNonRoot"):
            found["runAsNonRoot"] = uid != 0
        if own.get("seLinuxOptions"):  # the pod's own options apply to all containers
            found["seLinuxOptions"] = copy.deepcopy(own["seLinuxOptions"])
        return found

    def _understand_command(self) -> tuple[TrainingCommand | None, int, int | None]:
        """Return the command, the number of ranks in the pod, and the number of pods.

        The command is None if an earlier injection has already replaced it. The number of pods is None if
        only their owner specifies it.
        """
        if self.record is not None:
            return None, self.record.nproc, self.settings.members or self.record.members
        if _starts_launcher(self.training):
            raise _Unfit(
                f"the command starts Holdfast's launcher, but {pod_layout.INJECTED} is missing: create the"
                " pod from its original manifest"
            )
        command, args = pod_parts.texts(self.training, "command"), pod_parts.texts(self.training, "args")
        found = understand(command, args, self._variables(), self.settings.nproc_per_node)
        if isinstance(found, NotUnderstood):
            raise _Unfit(found.why)
        self.notes += found.notes
        if ":" in found.nnodes and _group_size(found.nnodes) is None and not self.settings.members:
            self.notes += (
                f"--nnodes={found.nnodes}: a run keeps the number of pods that its owner has at the start",
            )
        nproc = self._ranks(1 if found.nproc is None else found.nproc)
        members = self.settings.members or _group_size(found.nnodes)
        if (members or 1) * nproc > pod_layout.MAX_JOB_RANKS:
            raise _Unfit(
                f"the job has {members} pods of {nproc} ranks each, more than the"
                f" {pod_layout.MAX_JOB_RANKS:,} ranks that Holdfast supports"
            )
        return found, nproc, members

    def _variables(self) -> dict[str, str | None]:
        """Return the training container's variables. A value is None if the pod does not contain it."""
        found = pod_parts.items(self.training, "env")
        of_pod = {
            str(each.get("name")): None if "valueFrom" in each else str(each.get("value") or "")
            for each in found
        }
        return of_pod | dict(self.context.operator_variables)

    def _ranks(self, stated: int | str) -> int:
        """Return the number of ranks. "gpu" and "auto" mean one per GPU, or one if there are no GPUs."""
        if isinstance(stated, int):
            return stated
        own = pod_parts.mapping(self.training, "resources")
        gpus = pod_parts.mapping(own, "limits").get(pod_layout.GPU_RESOURCE)
        if stated == "cpu" or (gpus is None and own.get("claims")):
            raise _Unfit(
                f"the number of ranks ({stated}) is not known before the pod runs:"
                f" set {pod_layout.NPROC_PER_NODE} to a number"
            )
        try:
            return int(resources.quantity(gpus or 0)) or 1
        except ValueError as error:
            raise MalformedPod(f"{pod_layout.GPU_RESOURCE}: {error}") from None

    def _volume_bytes(self) -> int:
        """Return the size of the memory volume, which counts toward the training container's limit."""
        try:
            limit = resources.memory_limit(self.training, self.spec)
        except ValueError as error:
            raise MalformedPod(f"a limit: {error}") from None
        found = resources.volume_bytes(self.settings.state_bytes, limit)
        if limit is not None and found >= limit:
            raise _Unfit(
                f"snapshots need {resources.size(found)} of memory within the training container's limit of"
                f" {resources.size(limit)}: raise the limit, or lower {pod_layout.STATE_SIZE}"
            )
        return found

    def _plan_own_resources(self, volume_bytes: int) -> OwnResources:
        every = [*self.users, *pod_parts.items(self.spec, "initContainers")]
        users = [each for each in every if each.get("name") not in pod_layout.CONTAINERS]
        try:
            copy_bytes = (
                (self.settings.state_bytes or volume_bytes) if self.settings.checkpoints.objects else 0
            )
            found = resources.own_resources(users, self.spec, volume_bytes, copy_bytes)
        except ValueError as error:
            raise MalformedPod(f"resources: {error}") from None
        if found.guaranteed and self.settings.state_bytes is None:
            self.notes += (
                f"the sidecar requests {found.sidecar['requests']['memory']} of memory, most of it for"
                f" snapshots: set {pod_layout.STATE_SIZE} to request only what the training state needs",
            )
        return found

    def _set_command(self, command: TrainingCommand) -> None:
        options = (pod_layout.LIBRARY, "--warm", self.settings.warm, "--")
        words = command.started_by((command.interpreter, "-c", launch_commands.START, *options))
        self.training["command"] = list(words)
        if "args" in self.training:
            self.training["args"] = []

    def _add(self, added: PodAdditions, command: TrainingCommand | None) -> None:
        """Add everything to the pod. Holdfast's init containers come after those of other injectors."""
        extra = command.environment if command is not None else ()
        self._add_variables([*added.variables, *({"name": name, "value": value} for name, value in extra)])
        pod_parts.put(
            self.training,
            "volumeMounts",
            added.mounts,
            lambda each: (_name(each), _scalar(each, "mountPath")),
        )
        pod_parts.put(self.spec, "initContainers", added.containers, _name, last=True)
        pod_parts.put(self.spec, "volumes", added.volumes, _name)
        pod_parts.shorten_absence(self.spec)

    def _add_variables(self, wanted: list[PodObject]) -> None:
        present = {_name(each): each for each in pod_parts.items(self.training, "env")}
        for each in wanted:
            found = present.get(each["name"])
            if found is None or each["name"] in _USERS_OWN or pod_parts.covers(found, each):
                continue
            if self.record is None:
                raise _Unfit(f"the training container sets {each['name']}, which Holdfast sets itself")
        kept = [each for each in wanted if each["name"] not in _USERS_OWN or each["name"] not in present]
        pod_parts.put(self.training, "env", kept, _name)


def _check_kind(spec: Mapping[str, Any], annotations: Mapping[str, str], context: InjectionContext) -> None:
    """Raise `_Unfit` if the pod cannot run Holdfast, or must not be changed."""
    system = pod_parts.mapping(spec, "os").get("name")
    selected = pod_parts.mapping(spec, "nodeSelector").get("kubernetes.io/os")
    if "windows" in (system, selected):
        raise _Unfit("the pod is for Windows, but Holdfast runs on Linux")
    if any(each in annotations for each in pod_layout.STATIC_POD_ANNOTATIONS):
        raise _Unfit("the kubelet creates this pod from a file, which no webhook can change")
    if context.namespace in pod_layout.SYSTEM_NAMESPACES:
        raise _Unfit(f"pods in {context.namespace} are never injected")
    if not spec.get("containers"):
        raise _Unfit("the pod has no containers")


def _starts_launcher(container: Mapping[str, Any]) -> bool:
    words = [*pod_parts.texts(container, "command"), *pod_parts.texts(container, "args")]
    return f"{pod_layout.LIBRARY} --warm " in " ".join(words)


def _name(part: PodObject) -> object:
    return _scalar(part, "name")


def _scalar(part: PodObject, key: str) -> object:
    """Return the value at `key`, which in a manifest can be of any scalar type. Raises `MalformedPod`."""
    value = part.get(key)
    if isinstance(value, dict | list):
        raise MalformedPod(f"{key} is not a string")
    return value


def _group_size(nnodes: str) -> int | None:
    """Return the number of pods in torchrun's --nnodes; None if it is a range or not a number."""
    low, _, high = nnodes.partition(":")
    is_stated = low.isdecimal() and int(low) > 0 and high in ("", low)
    return int(low) if is_stated else None


def _digest(*parts: object) -> str:
    return hashlib.sha256(_compact(parts).encode()).hexdigest()[:16]


def _compact(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def json_patch(before: Any, after: Any) -> list[dict[str, Any]]:
    """Return the JSON patch (RFC 6902) that turns `before` into `after`.

    The patch contains only differences, so other webhooks' changes to other parts survive. Objects in lists
    are compared by index, and additional objects are appended. A list of strings is replaced as a whole. The
    operations depend only on the two documents.
    """
    return _changes("", before, after)


def _changes(path: str, before: Any, after: Any) -> list[dict[str, Any]]:
    if before is after:
        return []
    if isinstance(before, dict) and isinstance(after, dict):
        return _changes_of_mapping(path, before, after)
    if isinstance(before, list) and isinstance(after, list) and _has_parts(before) and _has_parts(after):
        return _changes_of_list(path, before, after)
    if type(before) is type(after) and before == after:
        return []
    return [{"op": "replace", "path": path, "value": after}]


def _has_parts(values: list[Any]) -> bool:
    return all(isinstance(each, dict | list) for each in values)


def _changes_of_mapping(path: str, before: PodObject, after: PodObject) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for key, value in before.items():
        if key in after:
            found += _changes(f"{path}/{_escaped(key)}", value, after[key])
        else:
            found.append({"op": "remove", "path": f"{path}/{_escaped(key)}"})
    for key, value in after.items():
        if key not in before:
            found.append({"op": "add", "path": f"{path}/{_escaped(key)}", "value": value})
    return found


def _changes_of_list(path: str, before: list[Any], after: list[Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for place, (old, new) in enumerate(zip(before, after, strict=False)):
        found += _changes(f"{path}/{place}", old, new)
    for place in range(len(before), len(after)):
        found.append({"op": "add", "path": f"{path}/{place}", "value": after[place]})
    for place in reversed(range(len(after), len(before))):
        found.append({"op": "remove", "path": f"{path}/{place}"})
    return found


def _escaped(key: object) -> str:
    return str(key).replace("~", "~0").replace("/", "~1")

"""Read what a pod states about itself in its labels, annotations and environment. Pure.

`kept` and `KeptPods` reduce each pod in a mirror of all pods to the parts that this module and
`supervisor.cluster.pods.read_pod` read: a few kilobytes, even for a huge pod.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

from holdfast.fileio import strict_json
from holdfast.fileio.strict_json import brief
from holdfast.protocol.codec import MAX_RANKS
from supervisor.admission.pod_layout import (
    INJECTED,
    MAX_INJECTED,
    MAX_INJECTED_VALUES,
    MEMBERS,
    NOT_INJECTED,
    NPROC_PER_NODE,
    PREFIX,
    STANDBY_OF,
)
from supervisor.cluster.adoption import untrusted_json
from supervisor.cluster.adoption.tolerations import MAX_TOLERATIONS
from supervisor.cluster.adoption.untrusted_json import MAX_TEXT, NAME, UID, UnfitObject, refuse, table
from supervisor.cluster.adoption.workload_kinds import PLACES, PodSource, shipped

MAX_MEMBERS = 4_096  # pods of one job
MAX_CONTAINERS = 128
MAX_REFERENCES = 64  # ownerReferences of one object
MAX_VARIABLES = 2_048  # the variables of one container
MAX_ADDRESSES = 4  # the addresses of one pod
MAX_MESSAGE = 300  # characters of the message that a container leaves when it ends
MAX_KEPT = 24_576  # characters of all labels, annotations, variables and owners of a pod that are kept
# The memory limit for the pods of one namespace, whose size `_weight` estimates. 16,384 members of one job
# take 45 MiB.
NAMESPACE_BYTES = 64 << 20
# The field of a kept object that says why its contents were cut. The API server sends no such field.
CUT = "holdfast.dev/cut"

_COUNT = re.compile(r"[1-9][0-9]{0,8}")
_INDEX = re.compile(r"[0-9]{1,9}")
_RANGE = re.compile(r"([1-9][0-9]{0,8})(?::([1-9][0-9]{0,8}))?")
_FIELD = re.compile(r"metadata\.(labels|annotations)\['([^']+)'\]")
_ORDINAL = re.compile(r"-([0-9]{1,9})$")
DISRUPTION = "DisruptionTarget"  # a condition of pods
ENDED_PHASES = ("Succeeded", "Failed")  # all containers have ended and will not be restarted


@dataclass(frozen=True, slots=True)
class PodFacts:
    """The parts of a pod that determine its job and its place in the job."""

    namespace: str
    name: str
    uid: str
    labels: Mapping[str, Any]
    annotations: Mapping[str, Any]
    spec: Mapping[str, Any]
    injected: Mapping[str, Any]  # the webhook's record; empty if it did not inject the pod
    nproc: int  # the number of ranks; 0 if the pod is not injected and does not state it
    has_ended: bool

    def annotation(self, key: str) -> str:
        """Return an annotation; "" if there is none."""
        return untrusted_json.text(self.annotations.get(key), f"{key} of pod {self.name}")

    def label(self, key: str) -> str:
        """Return a label; "" if there is none."""
        return untrusted_json.text(self.labels.get(key), f"{key} of pod {self.name}")


def read(raw: object) -> PodFacts:
    """Return the facts about a pod given as JSON. Raises `UnfitObject`."""
    if cut := table(raw, "the pod").get(CUT):
        refuse(str(cut))
    metadata = untrusted_json.metadata_of(raw, "the pod")
    name = untrusted_json.matching(NAME, metadata.get("name"), "the pod's name")
    annotations = table(metadata.get("annotations"), f"annotations of pod {name}")
    pod = table(raw, "the pod")
    phase = table(pod.get("status"), f"status of pod {name}").get("phase")
    injected = _injected(annotations)
    return PodFacts(
        namespace=untrusted_json.matching(NAME, metadata.get("namespace"), f"namespace of pod {name}"),
        name=name,
        uid=untrusted_json.matching(UID, metadata.get("uid"), f"uid of pod {name}"),
        labels=table(metadata.get("labels"), f"labels of pod {name}"),
        annotations=annotations,
        spec=table(pod.get("spec"), f"spec of pod {name}"),
        injected=injected,
        nproc=_nproc(annotations, injected),
        has_ended=metadata.get("deletionTimestamp") is not None or phase in ENDED_PHASES,
    )


def _injected(annotations: Mapping[str, Any]) -> Mapping[str, Any]:
    text = untrusted_json.text(annotations.get(INJECTED), INJECTED, MAX_INJECTED)
    if not text:
        return {}
    try:
        value = strict_json.loads(text.encode(errors="replace"), max_values=MAX_INJECTED_VALUES)
    except strict_json.RejectedJson as error:
        refuse(f"{INJECTED} {error}")
    return table(value, INJECTED)


def _nproc(annotations: Mapping[str, Any], injected: Mapping[str, Any]) -> int:
    """Return the number that the webhook recorded for the launcher, or else the number in the annotation."""
    written = untrusted_json.whole(injected.get("nproc"), f"nproc in {INJECTED}", MAX_RANKS, 0)
    text = untrusted_json.text(annotations.get(NPROC_PER_NODE), NPROC_PER_NODE)
    if written or NOT_INJECTED in annotations or not _COUNT.fullmatch(text):
        return written
    return untrusted_json.whole(int(text), NPROC_PER_NODE, MAX_RANKS, 0)


def members(pod: PodFacts) -> str:
    """Return the annotated number of members, such as "4" or "2:4", or "". Raises `UnfitObject`."""
    return _range(pod.annotation(MEMBERS), f"{MEMBERS} of pod {pod.name}")


def stated_members(pod: PodFacts) -> str:
    """Return the number of members that the webhook read from the command, or "". Raises `UnfitObject`."""
    where = f"members in {INJECTED} of pod {pod.name}"
    found = pod.injected.get("members")
    if isinstance(found, int):
        return str(untrusted_json.whole(found, where, MAX_MEMBERS, 0) or "")
    return _range(untrusted_json.text(found, where), where)


def _range(text: str, where: str) -> str:
    if not text:
        return ""
    found = _RANGE.fullmatch(text)
    low, high = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 0 < low <= high <= MAX_MEMBERS:
        refuse(f"{where} is {brief(text)}; expected a number up to {MAX_MEMBERS}, or a range such as 2:4")
    return text


def count(pod: PodFacts, sources: Iterable[PodSource]) -> int:
    """Return the number from the first source that has a value; 0 if none has. Raises `UnfitObject`."""
    for source in sources:
        if text := value(pod, source):
            if not _COUNT.fullmatch(text) or int(text) > MAX_MEMBERS:
                refuse(f"{source.key} of pod {pod.name} is {brief(text)}; expected 1 to {MAX_MEMBERS}")
            return int(text)
    return 0


def index(pod: PodFacts, sources: Iterable[PodSource]) -> int | None:
    """Return the number from the first source that has one; None if none has. Raises `UnfitObject`."""
    found = (text for source in sources if _INDEX.fullmatch(text := value(pod, source)))
    return next((int(text) for text in found), None)


def first(pod: PodFacts, sources: Iterable[PodSource]) -> str:
    """Return the first value that is not empty; "" if there is none. Raises `UnfitObject`."""
    return next((text for source in sources if (text := value(pod, source))), "")


def value(pod: PodFacts, source: PodSource) -> str:
    """Return the value that a pod has in `source`; "" if it has none. Raises `UnfitObject`."""
    if source.place == "label":
        return pod.label(source.key)
    if source.place == "annotation":
        return pod.annotation(source.key)
    if source.place == "env":
        return _variable(pod, source.key)
    ordinal = _ORDINAL.search(pod.name)
    return ordinal[1] if ordinal else ""


def _variable(pod: PodFacts, name: str) -> str:
    """Return a variable of the training container, or else of the first container that has it, or ""."""
    where = f"containers of pod {pod.name}"
    raw = untrusted_json.items(pod.spec.get("containers"), where, MAX_CONTAINERS)
    containers = [table(each, where) for each in raw]
    containers.sort(key=lambda each: each.get("name") != pod.injected.get("container"))
    for container in containers:
        for each in untrusted_json.items(container.get("env"), where, MAX_VARIABLES):
            variable = table(each, where)
            if variable.get("name") == name:
                return _resolved(pod, variable, where)
    return ""


def _resolved(pod: PodFacts, variable: Mapping[str, Any], where: str) -> str:
    """Return a variable's value if it is literal or comes from a label or annotation; "" otherwise."""
    if variable.get("value") is not None:
        return untrusted_json.text(variable["value"], where, MAX_INJECTED)
    path = untrusted_json.at(variable, "valueFrom.fieldRef.fieldPath", where)
    found = _FIELD.fullmatch(untrusted_json.text(path, where, MAX_INJECTED))
    if not found:
        return ""
    return pod.label(found[2]) if found[1] == "labels" else pod.annotation(found[2])


def training_container(raw: Mapping[str, Any]) -> str:
    """Return the training container's name from the webhook's record, else the first container's, or ""."""
    try:
        found = _injected(_part(_part(raw, "metadata"), "annotations")).get("container")
    except UnfitObject:
        found = None
    if isinstance(found, str):
        return found
    return next((str(each.get("name")) for each in _tables(_part(raw, "spec").get("containers"))), "")


# -- what is kept of a pod


def kept(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of a pod that the supervisor reads. Never raises.

    If what the pod states is too large or has a wrong type, the result contains only the pod's identity and
    state, and `read` refuses it with the reason. A pod that is already a member therefore remains a member.
    """
    outline = _outline(raw)
    try:
        stated = _statements(raw, outline["spec"]["containers"][0]["name"])
        if (size := characters(stated)) > MAX_KEPT:
            refuse(f"the pod states {size} characters about its job; expected at most {MAX_KEPT}")
    except UnfitObject as error:
        return {**outline, CUT: str(error)}
    metadata = {**outline["metadata"], **stated["metadata"]}
    return {**outline, "metadata": metadata, "spec": {**outline["spec"], **stated["spec"]}}


class KeptPods:
    """Prunes the pods of a mirror, and limits the memory that one namespace's pods take.

    Beyond the limit, only the identity and state of additional pods are kept, so these pods are not members.
    """

    def __init__(self) -> None:
        self._weights: dict[tuple[str, str], int] = {}
        self._taken: Counter[str] = Counter()  # the sum of the weights, by namespace

    def forget_all(self) -> None:
        """Call this before all pods are listed."""
        self._weights.clear()
        self._taken.clear()

    def forget(self, namespace: str, name: str) -> None:
        """Call this for a deleted pod."""
        self._taken[namespace] -= self._weights.pop((namespace, name), 0)
        if not self._taken[namespace]:
            del self._taken[namespace]

    def keep(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Return what is kept of a new or changed pod, as `kept` does."""
        found = kept(raw)
        place = str(found["metadata"].get("namespace", "")), str(found["metadata"].get("name"))
        self.forget(*place)
        if CUT in found:
            return found
        weight = _weight(found)
        if self._taken[place[0]] + weight > NAMESPACE_BYTES:
            why = f"the pods of its namespace take more than {NAMESPACE_BYTES >> 20} MiB in the supervisor"
            return {**_outline(raw), CUT: why}
        self._weights[place] = weight
        self._taken[place[0]] += weight
        return found


def _outline(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the identity and the state of a pod, with its training container only. Never raises."""
    metadata, spec, status = _part(raw, "metadata"), _part(raw, "spec"), _part(raw, "status")
    container = _short(training_container(raw))
    states = [each for each in _tables(status.get("containerStatuses")) if each.get("name") == container]
    disrupted = [
        {key: _short(each.get(key)) for key in ("type", "status", "reason")}
        for each in _tables(status.get("conditions"))
        if each.get("type") == DISRUPTION
    ]
    tolerated, others = _tolerations(spec), [{"ip": each} for each in other_addresses(status)]
    return {
        "apiVersion": _short(raw.get("apiVersion")),
        "kind": _short(raw.get("kind")),
        "metadata": {key: _short(metadata[key]) for key in _IDENTITY if key in metadata},
        "spec": {
            "nodeName": _short(spec.get("nodeName")),
            "containers": [{"name": container}],
            **({"tolerations": tolerated} if tolerated else {}),
        },
        "status": {
            "phase": _short(status.get("phase")),
            "podIP": _short(status.get("podIP")),
            "containerStatuses": [_state(each) for each in states[:1]],
            **({"conditions": disrupted[:1]} if disrupted else {}),
            **({"podIPs": others} if others else {}),
        },
    }


def other_addresses(status: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the addresses of a pod besides its `podIP`: with two IP families, there is one more."""
    found = (_short(each.get("ip")) for each in _tables(status.get("podIPs"))[:MAX_ADDRESSES])
    return tuple(each for each in found if isinstance(each, str) and each not in ("", status.get("podIP")))


def _tolerations(spec: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a pod's tolerations. Pods with equal tolerations share one list."""
    return _shared(
        tuple(
            tuple((key, _short(each[key])) for key in _TOLERATION if key in each)
            for each in _tables(spec.get("tolerations"))[:MAX_TOLERATIONS]
        )
    )


@lru_cache(maxsize=1024)
def _shared(tolerations: tuple[tuple[tuple[str, Any], ...], ...]) -> list[dict[str, Any]]:
    return [dict(each) for each in tolerations]


def _state(status: Mapping[str, Any]) -> dict[str, Any]:
    found = {key: _short(status.get(key)) for key in ("name", "containerID", "restartCount")}
    state = _part(status, "state")
    if "running" in state:
        return {**found, "state": _RUNNING}
    ended = _part(state, "terminated")
    code = ended.get("exitCode")
    if type(code) is not int:
        return {**found, "state": _NOT_RUNNING}
    return {**found, "state": {"terminated": {"exitCode": code, "message": termination_message(ended)}}}


def termination_message(ended: Mapping[str, Any]) -> str:
    """Return the message that a container left for the kubelet when it ended, shortened, in one line."""
    text = ended.get("message")
    return " ".join(text[:MAX_MESSAGE].split()) if isinstance(text, str) else ""


_IDENTITY = (
    "namespace",
    "name",
    "uid",
    "resourceVersion",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
)
_TOLERATION = ("key", "operator", "value", "effect", "tolerationSeconds")
_OWNER = ("apiVersion", "kind", "name", "uid", "controller")
_RUNNING: Mapping[str, Any] = {"running": {}}  # one object for all pods
_NOT_RUNNING: Mapping[str, Any] = {}


def _statements(raw: Mapping[str, Any], container: str) -> dict[str, Any]:
    """Return what a pod states about its job; the training `container` is first. Raises `UnfitObject`."""
    metadata = untrusted_json.metadata_of(raw, "the pod")
    name = metadata.get("name")
    labels = table(metadata.get("labels"), f"labels of pod {name}")
    annotations = table(metadata.get("annotations"), f"annotations of pod {name}")
    table(raw.get("status"), f"status of pod {name}")
    spec = table(raw.get("spec"), f"spec of pod {name}")
    containers = _stated_variables(spec, container, f"containers of pod {name}")
    referenced = [place for each in containers for place in _referenced(each["env"])]
    ours = {key: MAX_INJECTED for key in annotations if key.startswith(PREFIX)}
    read = dict.fromkeys(_keys_in("annotation", referenced), MAX_TEXT)
    return {
        "metadata": {
            "labels": {
                key: untrusted_json.text(labels[key], f"{key} of pod {name}")
                for key in (*_keys_in("label", referenced), STANDBY_OF)
                if key in labels
            },
            "annotations": {
                key: untrusted_json.text(annotations[key], f"{key} of pod {name}", most)
                for key, most in {**read, **ours}.items()
                if key in annotations
            },
            "ownerReferences": [_reference(each) for each in _references(metadata)],
        },
        "spec": {"containers": containers},
    }


def _references(metadata: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    found = untrusted_json.items(metadata.get("ownerReferences"), "ownerReferences", MAX_REFERENCES)
    return (table(each, "an owner reference") for each in found)


def _reference(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _short(raw[key]) for key in _OWNER if key in raw}


def _stated_variables(spec: Mapping[str, Any], container: str, where: str) -> list[dict[str, Any]]:
    """Return the training container, then the other containers with a variable that `value` may read."""
    containers = untrusted_json.items(spec.get("containers"), where, MAX_CONTAINERS)
    found = []
    for each in containers:
        env = _known_variables(table(each, where), where)
        if env or table(each, where).get("name") == container:
            found.append({"name": _short(each.get("name")), "env": env})
    found.sort(key=lambda each: each["name"] != container)
    return found


def _known_variables(container: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """Return the first variable of each name that `value` may read, with only the fields that it reads."""
    wanted = _places()["env"]
    found: dict[str, dict[str, Any]] = {}
    for each in untrusted_json.items(container.get("env"), where, MAX_VARIABLES):
        variable = table(each, where)
        name = variable.get("name")
        if isinstance(name, str) and name in wanted and name not in found:
            found[name] = {"name": name, **_source_of(variable, where)}
    return list(found.values())


def _source_of(variable: Mapping[str, Any], where: str) -> dict[str, Any]:
    if variable.get("value") is not None:
        return {"value": untrusted_json.text(variable["value"], where, MAX_INJECTED)}
    path = untrusted_json.at(variable, "valueFrom.fieldRef.fieldPath", where)
    return {"valueFrom": {"fieldRef": {"fieldPath": untrusted_json.text(path, where, MAX_INJECTED)}}}


def _referenced(variables: Iterable[Mapping[str, Any]]) -> Iterator[PodSource]:
    """Yield the labels and annotations that variables take their values from."""
    for each in variables:
        path = each.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", "")
        if found := _FIELD.fullmatch(path):
            yield PodSource(found[1].removesuffix("s"), found[2])


def _keys_in(place: str, referenced: Iterable[PodSource]) -> Iterable[str]:
    """Return the keys that `value` may read at `place`: those in the table, and those in `referenced`."""
    others = [each.key for each in referenced if each.place == place]
    return dict.fromkeys((*_places()[place], *others)) if others else _places()[place]


@cache
def _places() -> Mapping[str, Mapping[str, None]]:
    """Return the keys that `value` may be asked to read, by place, in the order of the table."""
    found: dict[str, dict[str, None]] = {place: {} for place in PLACES}
    for kind in (*shipped().owners, *shipped().pods):
        instance = (PodSource("label", kind.instance),) if kind.instance else ()
        indexes = (source for sources in kind.index for source in sources)
        for place, key in (*kind.replica_type, *kind.group, *kind.count, *instance, *indexes):
            found[place][key] = None
    for place, key in shipped().fallback_index:
        found[place][key] = None
    return found


def _part(raw: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a part of an object; an empty one if it has another type."""
    found = raw.get(name)
    return found if isinstance(found, Mapping) else {}


def _tables(value: object) -> list[Mapping[str, Any]]:
    """Return the objects in a list; none if the value has another type."""
    return [each for each in value if isinstance(each, Mapping)] if isinstance(value, list) else []


def _short(value: object) -> Any:
    """Return a number, or a string that is no longer than a name can be; None for any other value."""
    is_short = len(value) <= MAX_TEXT if isinstance(value, str) else isinstance(value, (int, float))
    return value if is_short else None


def characters(value: object) -> int:
    """Return the number of characters in all texts of a JSON value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(characters(key) + characters(each) for key, each in value.items())
    return sum(map(characters, value)) if isinstance(value, list) else 0


def _weight(pod: Mapping[str, Any]) -> int:
    """Return an estimate of the bytes that a kept pod takes."""
    return 2_048 + characters(pod)

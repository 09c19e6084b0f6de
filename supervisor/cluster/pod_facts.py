"""Read what a pod states about itself in its labels, annotations and environment. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.fileio import strict_json
from holdfast.fileio.strict_json import brief
from holdfast.protocol.codec import MAX_RANKS
from supervisor.admission.pod_layout import INJECTED, MEMBERS, NOT_INJECTED, NPROC_PER_NODE
from supervisor.cluster import untrusted_json
from supervisor.cluster.untrusted_json import NAME, UID, refuse, table
from supervisor.cluster.workload_kinds import PodSource

MAX_MEMBERS = 4_096  # pods of one job
MAX_CONTAINERS = 128
MAX_VARIABLES = 2_048  # of one container
MAX_INJECTED = 16_384  # characters of the JSON that the webhook writes

_COUNT = re.compile(r"[1-9][0-9]{0,8}")
_INDEX = re.compile(r"[0-9]{1,9}")
_RANGE = re.compile(r"([1-9][0-9]{0,8})(?::([1-9][0-9]{0,8}))?")
_FIELD = re.compile(r"metadata\.(labels|annotations)\['([^']+)'\]")
_ORDINAL = re.compile(r"-([0-9]{1,9})$")
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
    """Return the facts about a pod, which is given as JSON. Raises `UnfitObject`."""
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
        value = strict_json.loads(text.encode(errors="replace"), max_values=1_000)
    except strict_json.RejectedJson as error:
        refuse(f"{INJECTED} {error}")
    return table(value, INJECTED)


def _nproc(annotations: Mapping[str, Any], injected: Mapping[str, Any]) -> int:
    """Return the number that the webhook recorded and passed to the launcher, or else the annotated one."""
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
    """Return a variable of the training container or, if it lacks it, of the first one that has it, or ""."""
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

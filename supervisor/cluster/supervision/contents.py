"""Read what a `Supervision` contains: the owner, the size and settings of the run, and the stored state.

The status is written only by supervisors. Users can edit the spec, so nothing in it is trusted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from holdfast.fileio.strict_json import mapping
from holdfast.process import clock as hostclock
from supervisor.admission import pod_layout
from supervisor.cluster.adoption.job_membership import JobKey
from supervisor.cluster.adoption.untrusted_json import API_VERSION, NAME, UID, UnfitObject, matching
from supervisor.cluster.adoption.untrusted_json import KIND as OWNER_KIND
from supervisor.cluster.supervision import held_state
from supervisor.cluster.supervision.held_state import HeldState, Instant
from supervisor.kubernetes.client import KubernetesObject, ResourceKind
from supervisor.observability import short_status
from supervisor.view.model import JobState

log = logging.getLogger(__name__)

GROUP, VERSION, KIND = "holdfast.dev", "v1alpha1", "Supervision"
SUPERVISIONS = ResourceKind(GROUP, VERSION, "supervisions")


class RunSize(NamedTuple):
    """How many members a run trains with, and how many ranks each member has."""

    members: int
    nproc: int

    def __str__(self) -> str:
        return f"{self.members} members of {self.nproc} ranks"

    @classmethod
    def of(cls, memory: JobState) -> RunSize:
        return cls(memory.full_members, max(0, memory.nproc))


@dataclass(frozen=True, slots=True)
class OngoingRun:
    """A run that has not ended, as its Supervision describes it to the next leader."""

    key: JobKey
    uid: object  # the uid of the Supervision
    size: RunSize
    settings: Mapping[str, str]
    # all that had ranks or were present, even lost ones; those with ranks come first
    members: tuple[str, ...]


def names(key: JobKey) -> tuple[str, str]:
    """Return the name of the job's resource, and the name to use if the first belongs to another owner."""
    return key.name, f"{key.name}-{key.kind.lower() or 'pods'}"


def belongs_to(found: KubernetesObject, key: JobKey) -> bool:
    """Return True if a Supervision belongs to the job `key`, and not to another owner with the same name."""
    owner = owner_of(found)
    return (owner.get("kind") or "", owner.get("uid") or "") == (key.kind, key.uid)


def ongoing_run(found: KubernetesObject) -> OngoingRun | None:
    """Return the run in a Supervision; None if it has none, or if its run has ended.

    The status is written only by supervisors. Users can edit the spec, and a key that does not match the name
    of the resource would add the pods of this job to another job. Such a key is therefore refused.
    """
    status, spec = mapping(found.get("status")), mapping(found.get("spec"))
    key, held = _key_of(found), held_state_of(status) if status.get("phase") != "ended" else None
    if key is None or status.get("phase") in (None, "ended"):
        return None
    if held is not None and held.memory.phase != "ended":
        size, trained = RunSize.of(held.memory), (*held.memory.placement, *held.memory.lost)
    else:  # the run has not decided anything yet
        size, trained = RunSize(*(_count(spec.get(name)) for name in ("members", "nprocPerNode"))), ()
    shown = mapping(short_status.decode(status.get("view"))).get("members")
    present = [mapping(each).get("name") for each in shown] if isinstance(shown, list) else []
    members = dict.fromkeys((*trained, *(name for name in present if isinstance(name, str))))
    if not members or not all(size):
        return None
    return OngoingRun(key, found["metadata"].get("uid"), size, settings_of(spec), tuple(members))


def _count(value: object) -> int:
    return value if type(value) is int and value > 0 else 0


def settings_of(spec: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings in a spec, without values that are not strings."""
    found = mapping(spec.get("settings"))
    return {name: text for name, text in found.items() if isinstance(text, str)}


def _key_of(found: KubernetesObject) -> JobKey | None:
    """Return the job of a Supervision; None if its owner does not match its name."""
    owner, metadata = owner_of(found), found["metadata"]
    try:
        stated = matching(NAME, owner.get("name"), "name of the owner")
        is_owned = bool(owner.get("uid"))
        kind = matching(OWNER_KIND, owner.get("kind"), "kind of the owner") if is_owned else ""
        uid = matching(UID, owner.get("uid"), "uid of the owner") if is_owned else ""
        version = (
            matching(API_VERSION, owner.get("apiVersion"), "apiVersion of the owner") if is_owned else ""
        )
    except UnfitObject:
        return None
    key = JobKey(metadata["namespace"], metadata["name"], uid, kind, version, stated if is_owned else "")
    first, second = names(key)
    for name in (first, first.removesuffix(second.removeprefix(first))):
        if name == stated or (name.startswith(f"{stated}-") and name[len(stated) + 1 :].isdecimal()):
            return replace(key, name=name)
    return None


def supervision_of(pod: KubernetesObject) -> str:
    """Return the uid of the Supervision that owns a standby pod; "" if the pod is not a standby."""
    metadata = mapping(pod.get("metadata"))
    references = metadata.get("ownerReferences")
    if pod_layout.STANDBY_OF not in mapping(metadata.get("labels")) or not isinstance(references, list):
        return ""
    for each in map(mapping, references):
        is_ours = str(each.get("apiVersion", "")).partition("/")[0] == GROUP and each.get("kind") == KIND
        if is_ours and each.get("controller") is True:
            return str(each.get("uid") or "")
    return ""


def requests_only(found: KubernetesObject) -> KubernetesObject:
    """Return the parts of a Supervision that a mirror of all jobs needs: its owner and users' requests."""
    metadata, spec = found["metadata"], mapping(found.get("spec"))
    owner = mapping(spec.get("owner"))
    return {
        "metadata": {key: metadata[key] for key in _IDENTITY if key in metadata},
        "spec": {
            "owner": {key: owner[key] for key in ("kind", "uid") if key in owner},
            **{key: spec[key] for key in ("stop", "drill") if key in spec},
        },
    }


_IDENTITY = ("namespace", "name", "uid", "resourceVersion")


def is_news(old: KubernetesObject | None, new: KubernetesObject | None) -> bool:
    """True if the uid or the spec has changed, and not only other parts, such as the status."""
    return old is None or new is None or _uid_and_spec(old) != _uid_and_spec(new)


def _uid_and_spec(found: KubernetesObject) -> tuple[object, object]:
    return found["metadata"].get("uid"), found.get("spec")


def here() -> Instant:
    """Return the current moment on this host's clocks."""
    return Instant(time.monotonic_ns(), time.time(), hostclock.identity())


def held_state_of(status: Mapping[str, Any]) -> HeldState | None:
    text = status.get("memory")
    if not isinstance(text, str) or not text:
        return None
    try:
        return held_state.decode(text, here())
    except held_state.UnreadableState as error:  # the job resumes from its members' state or from storage
        log.error("the state in the resource cannot be read", extra={"error": str(error)})
        return None


def epoch_of(found: KubernetesObject) -> int:
    known = mapping(found.get("status")).get("epoch")
    return known if type(known) is int else 0


def recent_of(status: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    found = status.get("recent")
    return tuple(each for each in found if isinstance(each, dict)) if isinstance(found, list) else ()


def owner_of(found: KubernetesObject) -> Mapping[str, Any]:
    return mapping(mapping(found.get("spec")).get("owner"))

"""Check a manifest, before its pods exist, for pods that the supervisor would not adopt. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.fileio.strict_json import mapping
from supervisor.admission.pod_layout import MEMBERS
from supervisor.cluster.adoption import job_membership
from supervisor.cluster.adoption.job_membership import Adopted, NotAdopted, OwnerChain
from supervisor.cluster.adoption.owner_size import owner_size
from supervisor.cluster.adoption.untrusted_json import UnfitObject
from supervisor.cluster.adoption.workload_kinds import WorkloadKind, shipped

_UID = "00000000-0000-0000-0000-000000000000"  # for objects that do not exist yet


def problem(owner: Mapping[str, Any], path: str, template: Mapping[str, Any]) -> str:
    """Return why the job of an injected pod template would not train as its author expects; "" if it would.

    Args:
        owner: The object in the manifest that contains the template.
        path: The path of the template in that object, such as "spec.template".
        template: The pod template after injection. It may be anything that the manifest contains.
    """
    kind = shipped().find(str(owner.get("apiVersion")), str(owner.get("kind")))
    if kind is None or kind.instance or kind.below or not kind.size:
        return ""  # a pod, a kind that is not in the table, or one whose size the manifest does not contain
    content = {**owner, "metadata": {**mapping(owner.get("metadata")), "uid": _UID}}
    pod = _pod(content, kind, path, template)
    owners = job_membership.top_owner(pod, lambda _: content)
    found = job_membership.adopt(pod, owners, [pod])
    if isinstance(found, NotAdopted):
        return f"its pods would train unsupervised: {found.why}"
    return _too_large(found, owners, content, kind)


def _too_large(found: Adopted, owners: OwnerChain, content: Mapping[str, Any], kind: WorkloadKind) -> str:
    try:
        named = f"{content.get('kind')} {content['metadata'].get('name')}"
        pods = owner_size(content, named, kind, owners.idle, found.replica_type)
    except UnfitObject:
        return ""  # the author set the annotation because the object has no clear size
    if found.members <= pods:
        return ""
    return f"{MEMBERS} is {found.members}, but {named} has {pods} that train: the job would wait for more"


def _pod(
    owner: Mapping[str, Any], kind: WorkloadKind, path: str, template: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the pod that the owner's controller would create, with only the fields that are read."""
    metadata, above = mapping(template.get("metadata")), owner["metadata"]
    labels = dict(mapping(metadata.get("labels")))
    if part := _part(owner, kind, path.strip()):
        labels |= {source.key: part for source in kind.replica_type if source.place == "label"}
    namespace = above.get("namespace") or "default"
    reference = {
        "apiVersion": owner.get("apiVersion"),
        "kind": owner.get("kind"),
        "name": above.get("name"),
        "uid": _UID,
        "controller": True,
    }
    return {
        **template,
        "metadata": {
            **metadata,
            "name": f"{above.get('name')}-0",
            "namespace": namespace,
            "uid": _UID.replace("0", "1"),
            "labels": labels,
            "ownerReferences": [reference],
        },
    }


def _part(owner: Mapping[str, Any], kind: WorkloadKind, path: str) -> str:
    """Return the name of the replica type of the template at `path`; "" if there is only one."""
    if not kind.parts or not path.startswith(kind.parts):
        return ""
    rest = path.removeprefix(kind.parts)
    if not kind.part_name:
        return rest.removeprefix(".").partition(".")[0].lower()
    found: Any = owner
    for key in kind.parts.split("."):
        found = mapping(found).get(key)
    number = rest.removeprefix("[").partition("]")[0]
    is_there = isinstance(found, list) and number.isdecimal() and int(number) < len(found)
    return str(mapping(found[int(number)]).get(kind.part_name) or "") if is_there else ""

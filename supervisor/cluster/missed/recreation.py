"""Find out whether the owner of a pod would create it again, with Holdfast, if it were evicted. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from supervisor.admission.pod_layout import INJECT
from supervisor.cluster.adoption.pod_facts import DISRUPTION
from supervisor.cluster.adoption.untrusted_json import UnfitObject, at, items, table
from supervisor.cluster.adoption.workload_kinds import WorkloadKind, shipped

BACKOFF_LIMIT = 6  # the default of a Job
FAILURES = "batch.kubernetes.io/job-index-failure-count"  # an annotation of a pod, about its predecessors
MAX_RULES = 20


def controller_of(pod: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the reference to the object that controls a pod; None if there is none."""
    found = pod["metadata"].get("ownerReferences") or ()
    return next((each for each in found if each.get("controller") is True), None)


def kind_of(reference: Mapping[str, Any]) -> WorkloadKind | None:
    """Return the row of an owner that creates another pod in place of an evicted one; None for any other."""
    row = shipped().find(str(reference.get("apiVersion")), str(reference.get("kind")))
    return row if row is not None and row.recreates else None


def why_not(pod: Mapping[str, Any], reference: Mapping[str, Any], owner: Mapping[str, Any]) -> str:
    """Return why the owner would not create an evicted pod again with Holdfast; "" if it would.

    Args:
        pod: The pod.
        reference: The result of `controller_of` for the pod.
        owner: The object that `reference` names.
    """
    named = f"its owner, {reference.get('kind')} {reference.get('name')},"
    row = kind_of(reference)
    if row is None:
        return f"{named} is not known to create a pod in place of an evicted one"
    metadata = owner.get("metadata") or {}
    if metadata.get("uid") != reference.get("uid"):
        return f"{named} was deleted, or replaced by another object of this name"
    if metadata.get("deletionTimestamp") is not None:
        return f"{named} is being deleted"
    try:
        return _why_halted(row, owner, named) or _why_used_up(row, pod, owner, named)
    except UnfitObject as error:
        return f"{named} cannot be understood: {error}"


def _why_halted(row: WorkloadKind, owner: Mapping[str, Any], named: str) -> str:
    halted = at(owner, row.halt, named) if row.halt else None
    if halted is True or (type(halted) is int and not halted):
        return f"{named} is suspended, or scaled to 0"
    for path in row.templates if not row.parts else ():
        annotations = at(owner, f"{path}.metadata.annotations", named)
        stated = annotations.get(INJECT, "true") if isinstance(annotations, Mapping) else "true"
        if stated != "true":
            return f"{named} no longer requests Holdfast for its pods"
    return ""


def _why_used_up(row: WorkloadKind, pod: Mapping[str, Any], owner: Mapping[str, Any], named: str) -> str:
    """Return why a Job would fail if one more of its pods were evicted; "" if it would not."""
    if (row.kind, row.groups) != ("Job", ("batch",)) or _is_ignored(owner, named):
        return ""
    spec, status = table(owner.get("spec"), named), table(owner.get("status"), named)
    per_index = spec.get("backoffLimitPerIndex")
    if type(per_index) is int:
        text = str((pod["metadata"].get("annotations") or {}).get(FAILURES, "0"))
        failed, limit = int(text) if text.isdecimal() else per_index, per_index
    else:
        found, limit = status.get("failed") or 0, spec.get("backoffLimit", BACKOFF_LIMIT)
        failed = found if type(found) is int else 0
    if type(limit) is int and failed >= limit:
        return (
            f"{named} counts an evicted pod as a failure, and allows no more of them (backoffLimit {limit}):"
            f" ignore the condition {DISRUPTION} in its podFailurePolicy"
        )
    return ""


def _is_ignored(owner: Mapping[str, Any], named: str) -> bool:
    """Return True if the Job's policy does not count an evicted pod as a failure.

    The first rule that matches the pod decides, so a rule about exit codes before it could still decide
    otherwise: an evicted pod that ends by SIGTERM has an exit code, too.
    """
    for each in items(at(owner, "spec.podFailurePolicy.rules", named), named, MAX_RULES):
        rule = table(each, named)
        patterns = items(rule.get("onPodConditions"), named, MAX_RULES)
        if any(table(pattern, named).get("type") == DISRUPTION for pattern in patterns):
            return rule.get("action") == "Ignore"
        if rule.get("onExitCodes") is not None and rule.get("action") != "Ignore":
            return False
    return False

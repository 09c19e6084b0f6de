"""Prove that the API server would create a pod again with Holdfast, by a dry run of its creation.

A ready pod of the webhook proves less: the API server may not reach it, may not trust its certificate, or may
exclude the namespace. A dry run takes the whole way of a real request, and stores nothing.

The copy that is created in the dry run looks like a standby to the policy `holdfast-standbys`, so the
supervisor needs no additional right.
"""

from __future__ import annotations

from supervisor.admission import pod_layout
from supervisor.cluster.standbys.pod_copy import copy_of
from supervisor.kubernetes.client import PODS, ApiServer, KubernetesObject
from supervisor.kubernetes.errors import AlreadyThere, ApiError, Forbidden

NAME = "holdfast-dry-run-"
UID_DIGITS = 8
AWAY = "the webhook does not inject its pods yet"
_QUOTA = "exceeded quota"


async def why_not_injected(
    server: ApiServer, pod: KubernetesObject, supervision: str, supervision_uid: str
) -> str:
    """Return why a pod like `pod` would not be created with Holdfast now; "" if it would be.

    The pod counts against quotas until it is gone, so a copy beside it may exceed a quota that its successor
    does not exceed. In this case, a warning of the webhook is the proof.

    Raises `OSError` if the API server does not answer.
    """
    name = NAME + str(pod["metadata"]["uid"])[:UID_DIGITS]
    copied = copy_of(pod, name, supervision, supervision_uid)
    try:
        found = await server.create(PODS, copied, pod["metadata"]["namespace"], dry_run=True)
    except AlreadyThere:
        return f"pod {name} exists, which is the name of a dry run"
    except ApiError as error:
        is_injected = any(pod_layout.WOULD_INJECT in each for each in error.warnings)
        if isinstance(error, Forbidden) and is_injected and _QUOTA in error.message:
            return ""
        return f"a dry run of its creation is refused: {error.message}"
    metadata = found["metadata"]
    annotations, labels = metadata.get("annotations") or {}, metadata.get("labels") or {}
    if stated := annotations.get(pod_layout.NOT_INJECTED):
        return f"the webhook would not inject it: {stated}"
    is_injected = labels.get(pod_layout.MEMBER_LABEL) == pod_layout.IS_MEMBER
    return "" if is_injected and pod_layout.INJECTED in annotations else AWAY

"""Take over a job at the API server, and pause after a failure."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from supervisor.cluster.pod_groups import NOT_SUPERVISED
from supervisor.cluster.pods import PodGroup, held_policy
from supervisor.cluster.run_summary import RETRY_S
from supervisor.cluster.supervision import contents
from supervisor.cluster.supervision.contents import RunSize
from supervisor.cluster.supervision.job_events import JobEvents
from supervisor.cluster.supervision.resource import (
    OwnerGone,
    SupervisionResource,
    Takeover,
    ensure_resource,
)
from supervisor.kubernetes.client import ApiServer
from supervisor.kubernetes.errors import ApiError
from supervisor.kubernetes.leadership import sent_within
from supervisor.view.model import Policy

log = logging.getLogger(__name__)

MAX_RETRY_S = 30.0  # replaces `RETRY_S` after requests have failed for a long time
REFUSED_S = 5.0  # a refusal that lasts longer than this is recorded as an event
COLLECT_S = 60.0  # replaces `REFUSED_S` while a deleted owner's resource still has the name


class JobTakeover:
    """Takes over one job, whose Supervision is `resource` once it is known."""

    def __init__(
        self, server: ApiServer, epoch: int, term_left_s: Callable[[], float], events: JobEvents
    ) -> None:
        """`epoch` is the leader's; `term_left_s` returns how long this leader certainly still leads."""
        self._server, self._epoch, self._term_left_s, self._events = server, epoch, term_left_s, events
        self.resource: SupervisionResource | None = None
        self._problem = ""  # the last problem that was recorded as an event

    async def take_over(self, group: PodGroup) -> Takeover:
        """Take over the job, but only during the term: a later takeover would depose a successor."""
        return await sent_within(self._term_left_s, self._take_over_now(group))

    async def _take_over_now(self, group: PodGroup) -> Takeover:
        self.resource = await ensure_resource(self._server, group.key, group.size, group.settings)
        self._events.resource_name = self.resource.name
        return await self.resource.take_over(self._epoch)

    async def policy(self, group: PodGroup, found: Takeover, fresh: bool) -> Policy:
        """Return the policy of the run being taken over or, if `fresh`, of the new one.

        A run keeps its size and settings until it ends, because its ranks were started with them.
        """
        if fresh or found.state is None:
            assert self.resource is not None  # because the job is taken over
            await self.resource.describe(found.epoch, found.spec, group.size, group.settings)
            return group.policy
        settings, size = contents.settings_of(found.spec), RunSize.of(found.state.memory)
        if settings == group.settings:
            return replace(group.policy, members=size.members, nproc=size.nproc)
        return held_policy(settings, *size)

    def note_failure(self, error: Exception, failed_s: float) -> float:
        """Log why the job could not be taken over, and return how many seconds to wait before the next try.

        A refusal that lasts, which `failed_s` shows, is also recorded as an event, once for each reason. If
        the owner of the resource is gone, it must last longer, because the resource is usually deleted soon.
        """
        if not isinstance(error, (ApiError, OSError)):
            log.error("job not taken over", exc_info=error)
            return RETRY_S
        log.warning("job not taken over", extra={"error": str(error)})
        if isinstance(error, OSError) and not isinstance(error, OwnerGone):
            return RETRY_S
        least_s = COLLECT_S if isinstance(error, OwnerGone) else REFUSED_S
        if failed_s >= least_s and self._problem != str(error):
            self._problem = str(error)
            self._events.warn_owner(
                NOT_SUPERVISED, f"the Supervision of this job cannot be created or changed: {error}"
            )
        return min(max(RETRY_S, failed_s / 4), MAX_RETRY_S)

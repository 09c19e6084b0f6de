"""A user's request to stop a job, which is a field of the job's Supervision until a user removes it."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from supervisor.cluster.supervision.fenced_records import SupervisionRecords
from supervisor.cluster.supervision.resource import SupervisionResource
from supervisor.kubernetes.errors import ApiError
from supervisor.store.run_lead import Deposed
from supervisor.view.model import StopRequest

log = logging.getLogger(__name__)

# How long the mirror may still show a removed request to stop. A request that it shows later is a new one.
REMOVAL_S = 60.0


class RequestedStop:
    """The request to stop in the resource of one job."""

    def __init__(self) -> None:
        self._shown: object = None  # as the mirror last showed it
        # when this supervisor removed a request that was for an earlier run
        self._removed_s: float | None = None

    @property
    def current(self) -> StopRequest:
        """The request to stop that is in force; "" for none."""
        shown = self._shown if self._removed_s is None else None
        return "now" if shown == "now" else "graceful" if shown == "graceful" else ""

    def begin(self, spec: Mapping[str, Any]) -> None:
        """Read the request from the spec that a takeover found, before the mirror has shown the resource."""
        self._shown = spec.get("stop")

    def update(self, spec: Mapping[str, Any]) -> None:
        """Read the request from the spec that the mirror shows."""
        self._shown = spec.get("stop")
        if self._removed_s is not None:
            is_shown_late = time.monotonic() < self._removed_s + REMOVAL_S
            if not (self._shown and is_shown_late):
                self._removed_s = None

    async def remove(self, resource: SupervisionResource, epoch: int) -> None:
        """Remove a request to stop that was for an earlier run. Raises `Deposed`."""
        await resource.request_stop(epoch, None)
        self._removed_s = time.monotonic()


async def record_stop(resource: SupervisionResource, records: SupervisionRecords, how: StopRequest) -> None:
    """Write a request to stop into the resource, where the next supervisor reads it."""
    try:
        await resource.request_stop(records.lead.epoch, "now" if how == "now" else "graceful")
    except Deposed:
        records.lead.depose()
    except (ApiError, OSError) as error:
        log.warning("request to stop not recorded", extra={"error": str(error)})

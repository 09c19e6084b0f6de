"""Record Kubernetes events about one job: about its Supervision or, without one, about its owner."""

from __future__ import annotations

from supervisor.cluster.adoption.job_membership import JobKey
from supervisor.cluster.supervision import contents
from supervisor.kubernetes.events import EventRecorder, ObjectReference


class JobEvents:
    """The events of one job. Set `resource_name` as soon as the name of the job's Supervision is known."""

    def __init__(self, recorder: EventRecorder, key: JobKey) -> None:
        self._recorder, self._key = recorder, key
        self.resource_name = key.name

    def record(self, reason: str, message: str, *, bad: bool = False) -> None:
        """Record an event about the job's Supervision, as a warning if `bad`."""
        reference = ObjectReference(
            contents.SUPERVISIONS.api_version, contents.KIND, self._key.namespace, self.resource_name, ""
        )
        self._recorder.record(reference, reason, message, "Warning" if bad else "Normal")

    def warn_owner(self, reason: str, message: str) -> None:
        """Record a warning about the job's owner, if it has one, because its Supervision may not exist."""
        key = self._key
        if not key.uid:
            self.record(reason, message, bad=True)
            return
        owner = ObjectReference(key.api_version, key.kind, key.namespace, key.owner_name, key.uid)
        self._recorder.record(owner, reason, message, "Warning")

"""Read a job on a cluster from its Supervision, as commands read a run from its directory."""

from __future__ import annotations

import difflib
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import PurePosixPath
from typing import Any

from holdfast.errors import BadInput
from holdfast.fileio.strict_json import mapping
from supervisor.cli.command_options import ClusterOptions, JobOptions
from supervisor.cli.on_cluster.connection import NOT_INSTALLED, ClusterConnection
from supervisor.cli.on_cluster.resource import recent_of, status_of, view_of
from supervisor.cluster.supervision.contents import SUPERVISIONS
from supervisor.kubernetes.client import KubernetesObject
from supervisor.kubernetes.errors import ApiError, NotFound, ServerUnreachable

READ_S = 1.0  # between two reads while a command waits for a job
SUMMARY_S = 8.0  # how long to wait for the last status of a job that has ended


class NamedJob:
    """The records of one job on a cluster. Implements `RunRecords`.

    `check_in_use` rereads the resource, at most every `READ_S`. A job whose resource was deleted is treated
    as ended.
    """

    def __init__(self, connection: ClusterConnection, namespace: str, name: str) -> None:
        """Read the job. Raises `NotFound` if it does not exist, or another exception of `ApiServer`."""
        self.namespace, self.name = namespace, name
        self.path = PurePosixPath(namespace, name)
        self.is_gone = False
        self._connection = connection
        self._object: KubernetesObject = {}
        self._read_s = self._ended_s = float("-inf")
        self.read()

    def read(self) -> None:
        """Read the resource. Raises the exceptions of `ApiServer`."""
        self._read_s = time.monotonic()
        self._object = self._connection.ask(
            lambda server: server.get(SUPERVISIONS, self.name, self.namespace)
        )

    def change(self, spec: Mapping[str, object], *, version: str = "") -> None:
        """Set fields of the spec. With `version`, raises `Conflict` if the resource's version differs."""
        body: dict[str, Any] = {"spec": dict(spec)}
        if version:
            body["metadata"] = {"resourceVersion": version}
        self._object = self._connection.ask(
            lambda server: server.patch(SUPERVISIONS, self.name, body, self.namespace)
        )

    # -- the resource

    @property
    def version(self) -> str:
        return str(self._object["metadata"]["resourceVersion"])

    @property
    def spec(self) -> Mapping[str, Any]:
        return mapping(self._object.get("spec"))

    @property
    def summary(self) -> Mapping[str, Any]:
        """The resource's status, which contains a few fields of the run's status."""
        return mapping(self._object.get("status"))

    # -- records, as in a run's directory

    def status(self) -> dict[str, Any] | None:
        """Return the last status, or only the resource's own fields if the status did not fit into it."""
        return status_of(self._object)

    def has_status(self) -> bool:
        return bool(self.summary.get("phase"))

    def check_in_use(self) -> bool:
        """Return True until the job has ended and its last status is written, or `SUMMARY_S` after the
        end."""
        if not self.is_gone and time.monotonic() - self._read_s >= READ_S:
            try:
                with suppress(ServerUnreachable):  # the next read may succeed
                    self.read()
            except NotFound:
                self.is_gone = True
        if self.is_gone:
            return False
        if self.summary.get("phase") != "ended":
            self._ended_s = float("-inf")
            return True
        if self._ended_s == float("-inf"):
            self._ended_s = time.monotonic()
        view = view_of(self._object)
        is_late = view is not None and view.get("phase") != "ended"
        return is_late and time.monotonic() - self._ended_s < SUMMARY_S

    def incidents(self) -> list[dict[str, Any]]:
        """Return the last incidents. `omitted` is the number of earlier incidents."""
        return recent_of(self._object)

    def unreadable_incidents(self) -> list[str]:
        return []

    @property
    def omitted(self) -> int:
        """The number of incidents that the resource no longer contains."""
        total = self.summary.get("incidents")
        opened = bool((self.status() or {}).get("open_incident"))
        return max(0, (total if type(total) is int else 0) - len(self.incidents()) - opened)


def find(connection: ClusterConnection, options: JobOptions) -> NamedJob:
    """Return the job that `options` select. Raises `BadInput` if it does not exist."""
    namespace, name = place(connection, options, options.job)
    try:
        return NamedJob(connection, namespace, name)
    except NotFound:
        raise BadInput(_unknown(connection, namespace, name)) from None


def place(connection: ClusterConnection, options: ClusterOptions, word: str) -> tuple[str, str]:
    """Split NAME or NAMESPACE/NAME.

    The default namespace comes from the options or, failing that, from the context.
    """
    given, slash, name = word.rpartition("/")
    return (given if slash else options.namespace or connection.namespace), name


def _unknown(connection: ClusterConnection, namespace: str, name: str) -> str:
    """Return the error message for an unknown job, which suggests the most similar name."""
    try:
        listed = connection.ask(lambda server: server.list(SUPERVISIONS, namespace, prune=_metadata_only))
    except NotFound:
        return NOT_INSTALLED
    except (ApiError, OSError):
        known: list[str] = []
    else:
        known = [str(each["metadata"]["name"]) for each in listed.objects]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"no job {name!r} in namespace {namespace!r}: {hint}`holdfast jobs -A` lists all jobs"


def _metadata_only(found: KubernetesObject) -> KubernetesObject:
    return {"metadata": found["metadata"]}

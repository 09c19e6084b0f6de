"""Create a job's `Supervision`, take it over, and write it.

Every write, including the one that takes a higher epoch, tests that the resource is still the same and has
this supervisor's epoch. Therefore, a supervisor that was replaced, or whose job was deleted, cannot change
anything, even if its requests arrive late.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast.fileio.strict_json import mapping
from supervisor.cluster.adoption.job_membership import JobKey
from supervisor.cluster.supervision.contents import (
    KIND,
    SUPERVISIONS,
    RunSize,
    belongs_to,
    epoch_of,
    held_state_of,
    names,
    owner_of,
    recent_of,
)
from supervisor.cluster.supervision.held_state import HeldState
from supervisor.kubernetes.client import ApiServer, KubernetesObject, PatchType
from supervisor.kubernetes.errors import AlreadyThere, Conflict, InvalidObject, NotFound
from supervisor.observability import short_status
from supervisor.store.run_lead import Deposed

TAKE_OVER_TRIES = 5  # attempts at a conditional write, which fails if another writer is faster


@dataclass(frozen=True, slots=True)
class Takeover:
    """What a supervisor finds in the resource when it takes over a job. `state` is None for a new job."""

    epoch: int
    state: HeldState | None
    view: Mapping[str, Any] | None  # the last published status
    recent: tuple[Mapping[str, Any], ...]  # the last incidents
    spec: Mapping[str, Any] = field(default_factory=dict, compare=False)  # describes the run in `state`
    standbys: Mapping[str, Any] = field(default_factory=dict, compare=False)  # as the last leader showed them
    is_over: bool = False  # the run in `state` has ended, and its end was also recorded for users


class OwnerGone(OSError):
    """The Supervision with this name belongs to another owner, which is usually gone. Try again later."""


class SupervisionResource:
    """The resource of one job. All methods can raise `ApiError` or `ServerUnreachable`, an `OSError`."""

    def __init__(self, server: ApiServer, key: JobKey, name: str) -> None:
        self.namespace, self.name = key.namespace, name
        self._server, self._key = server, key
        self.uid: object = None  # the uid of the resource that was taken over

    async def take_over(self, least_epoch: int) -> Takeover:
        """Claim an epoch, and return the contents of the resource.

        The epoch is above all earlier ones, and at least `least_epoch`. Raises `Conflict` if the resource
        changes during each of `TAKE_OVER_TRIES` attempts.
        """
        for tries_left in reversed(range(TAKE_OVER_TRIES)):
            found = await self._server.get(SUPERVISIONS, self.name, self.namespace)
            if not belongs_to(found, self._key):  # it has replaced the resource that existed a moment ago
                raise OwnerGone(f"the Supervision {self.name} now belongs to another owner")
            status = mapping(found.get("status"))
            epoch = max(least_epoch, epoch_of(found) + 1)
            change = {
                "metadata": {"resourceVersion": found["metadata"]["resourceVersion"]},
                "status": {"epoch": epoch},
            }
            try:
                await self._patch(change, PatchType.MERGE)
            except Conflict:
                if not tries_left:
                    raise
                continue
            self.uid = found["metadata"].get("uid")
            view = short_status.decode(status.get("view"))
            state, spec = held_state_of(status), mapping(found.get("spec"))
            standbys = mapping(status.get("standbys"))
            return Takeover(epoch, state, view, recent_of(status), spec, standbys, _is_over(state, status))
        raise AssertionError("unreachable")

    async def describe(
        self, epoch: int, before: Mapping[str, Any], size: RunSize, settings: Mapping[str, str]
    ) -> None:
        """Write the size and the settings of a new run into the spec, whose content is `before`.

        Until the run ends, each supervisor reads them there, even if the pods now state something else.
        Raises `Deposed` if another supervisor has taken over the job.
        """
        spec = described(size, settings)
        if {name: before.get(name) for name in spec} != spec:
            await self._change_spec(epoch, [_set("spec", name, each) for name, each in spec.items()])

    async def write(self, epoch: int, values: Mapping[str, Any]) -> None:
        """Set fields of the status. Raises `Deposed` if another supervisor has taken over the job."""
        change = [*self._still(epoch), *(_set("status", name, value) for name, value in values.items())]
        try:
            await self._patch(change, PatchType.JSON)
        except InvalidObject:
            found = await self._find_successor(epoch)
            if epoch_of(found) == epoch:
                raise
            await self._write_again(found, epoch, values)

    async def _find_successor(self, epoch: int) -> KubernetesObject:
        """Return the resource, after the API server refused a write with `epoch`.

        Raises `Deposed` if another supervisor has taken over the job.
        """
        found = await self._server.get(SUPERVISIONS, self.name, self.namespace)
        known = epoch_of(found)
        if known > epoch or found["metadata"].get("uid") != self.uid:
            raise Deposed(epoch, known) from None
        return found

    async def _change_spec(self, epoch: int, change: Sequence[KubernetesObject]) -> None:
        try:
            await self._server.patch(
                SUPERVISIONS, self.name, [*self._still(epoch), *change], self.namespace, how=PatchType.JSON
            )
        except InvalidObject:
            await self._find_successor(epoch)
            raise

    async def _write_again(self, found: KubernetesObject, epoch: int, values: Mapping[str, Any]) -> None:
        """Write into a resource whose status, and with it this epoch, was removed or restored from a backup.

        Raises `Conflict` if another supervisor has written to the resource since `found` was read.
        """
        version = {"resourceVersion": found["metadata"]["resourceVersion"]}
        await self._patch({"metadata": version, "status": {"epoch": epoch, **values}}, PatchType.MERGE)

    async def stored(self) -> tuple[int, object]:
        """Return the epoch in the resource, and the claim that last raised it."""
        found = await self._server.get(SUPERVISIONS, self.name, self.namespace)
        return epoch_of(found), mapping(found.get("status")).get("claim")

    async def request_stop(self, epoch: int, how: str | None) -> None:
        """Record a user's request to stop the job, so that the next supervisor knows about it too.

        None removes an earlier request. Raises `Deposed` if another supervisor has taken over the job,
        because the request may be for an earlier run than the one that this supervisor knows.
        """
        change = [_set("spec", "stop", how or "now")]
        if how is None:  # a missing field cannot be removed, so set it first
            change.append({"op": "remove", "path": "/spec/stop"})
        await self._change_spec(epoch, change)

    def _still(self, epoch: int) -> list[KubernetesObject]:
        """Return JSON patch tests that fail unless this is still the resource that was taken over.

        Its owner may have been deleted in the meantime. A new owner with the same name has a resource with
        the same name, and often with the same epoch.
        """
        return [
            {"op": "test", "path": "/metadata/uid", "value": self.uid},
            {"op": "test", "path": "/status/epoch", "value": epoch},
        ]

    async def _patch(
        self, change: KubernetesObject | Sequence[KubernetesObject], how: PatchType
    ) -> KubernetesObject:
        return await self._server.patch(
            SUPERVISIONS, self.name, change, self.namespace, how=how, subresource="status"
        )


async def ensure_resource(
    server: ApiServer, key: JobKey, size: RunSize, settings: Mapping[str, str]
) -> SupervisionResource:
    """Return the resource of the job `key`. If there is none, create it with this size and these settings.

    Raises `OwnerGone`, an `OSError`, if the resource with that name still belongs to another owner.
    """
    spec = described(size, settings)
    owner = {
        "apiVersion": key.api_version,
        "kind": key.kind,
        "name": key.owner_name or key.name,
        "uid": key.uid,
    }
    metadata: dict[str, Any] = {"namespace": key.namespace}
    if key.uid:
        metadata["ownerReferences"] = [owner]
    for name in names(key):
        body = {
            "apiVersion": SUPERVISIONS.api_version,
            "kind": KIND,
            "metadata": {**metadata, "name": name},
            "spec": {**spec, "owner": owner},
        }
        try:
            await server.create(SUPERVISIONS, body, key.namespace)
        except AlreadyThere:
            found = await server.get(SUPERVISIONS, name, key.namespace)
            known = owner_of(found)
            if known.get("kind") != key.kind:  # an owner of another kind has the same name
                continue
            if known.get("uid") != key.uid:  # the resource is usually being garbage-collected with its owner
                other = f"{known.get('apiVersion')} {key.kind} {known.get('name')}"
                raise OwnerGone(
                    f"the Supervision {name} belongs to {other} with the uid {known.get('uid')}"
                ) from None
        return SupervisionResource(server, key, name)
    raise OwnerGone(f"both names for the Supervision of {key.name} belong to other owners")


async def run_has_ended(server: ApiServer, key: JobKey) -> bool:
    """Return True if the last run of the job `key` has ended, and its end was also recorded for users."""
    for name in names(key):
        try:
            found = await server.get(SUPERVISIONS, name, key.namespace)
        except NotFound:
            continue
        if belongs_to(found, key):
            status = mapping(found.get("status"))
            return _is_over(held_state_of(status), status)
    return False


def _is_over(held: HeldState | None, status: Mapping[str, Any]) -> bool:
    return held is not None and held.memory.phase == "ended" and type(status.get("exitCode")) is int


def described(size: RunSize, settings: Mapping[str, str]) -> dict[str, Any]:
    return {"members": size.members, "nprocPerNode": size.nproc, "settings": dict(settings)}


def _set(part: str, name: str, value: object) -> dict[str, Any]:
    return {"op": "add", "path": f"/{part}/{name}", "value": value}

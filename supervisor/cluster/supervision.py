"""The `Supervision` of a job: a resource with the job's state for the next supervisor, and its summary.

Every write tests that the resource still has this supervisor's epoch, also the one that takes a higher epoch.
A supervisor that was replaced can therefore change nothing, however late its requests arrive.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import logging
import secrets
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from holdfast.process import clock as hostclock
from holdfast.protocol.foreign_text import shortened
from supervisor.cluster import held_state
from supervisor.cluster.held_state import HeldState, Instant
from supervisor.cluster.job_membership import JobKey
from supervisor.controller.records import CheckpointSource
from supervisor.kubernetes.client import ApiServer, KubernetesObject, PatchType, ResourceKind
from supervisor.kubernetes.errors import AlreadyThere, ApiError, Conflict, InvalidObject, NotFound
from supervisor.observability import short_status
from supervisor.store.journal import LastEntry
from supervisor.store.leadership import MAX_EPOCH, Deposed, Lead
from supervisor.view.model import Done, JobState, Policy, RunAction, View

log = logging.getLogger(__name__)

GROUP, VERSION, KIND = "holdfast.dev", "v1alpha1", "Supervision"
SUPERVISIONS = ResourceKind(GROUP, VERSION, "supervisions")
SAVE_S = 5.0  # limit for writing a decision; the job carries it out sooner if the write is slow
TAKE_OVER_TRIES = 5  # of a conditional write, which fails if another writer is faster
MAX_RECENT = 10  # incidents
MAX_INCIDENT_BYTES = 3 << 10
MAX_FIELD_BYTES = 200  # of an incident that is still too large when its texts are shortened
DRILL_DONE = "carried out"  # the result of a drill that was not refused
RAISE_S = 1.5  # limit for taking a higher epoch, for which a decision waits
RAISE_AGAIN_S = 2.0  # until that is tried again: the decisions in between do not wait
MAX_UNSURE = 16  # remembered claims of a new epoch whose answer was lost


@dataclass(frozen=True, slots=True)
class Takeover:
    """What a supervisor finds when it takes over a job. `state` is None for a new job."""

    epoch: int
    state: HeldState | None
    view: Mapping[str, Any] | None  # the last published status
    recent: tuple[Mapping[str, Any], ...]  # the last incidents


class OwnerGone(OSError):
    """The Supervision of this name belongs to another owner, which is usually gone. Try again later."""


class SupervisionResource:
    """The resource of one job. All methods raise `ApiError` or `ServerUnreachable`, an `OSError`."""

    def __init__(self, server: ApiServer, namespace: str, name: str) -> None:
        self.namespace, self.name = namespace, name
        self._server = server
        self.uid: object = None  # of the resource that was taken over

    async def take_over(self, least_epoch: int) -> Takeover:
        """Claim an epoch above all earlier ones, at least `least_epoch`, and return what the resource holds.

        Raises `Conflict` if the resource changes during each of `TAKE_OVER_TRIES` attempts.
        """
        for tries_left in reversed(range(TAKE_OVER_TRIES)):
            found = await self._server.get(SUPERVISIONS, self.name, self.namespace)
            status = _mapping(found.get("status"))
            epoch = max(least_epoch, _epoch(found) + 1)
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
            return Takeover(epoch, _held(status), short_status.decode(status.get("view")), _recent(status))
        raise AssertionError("unreachable")

    async def write(self, epoch: int, values: Mapping[str, Any]) -> None:
        """Set fields of the status. Raises `Deposed` if another supervisor has taken over the job."""
        change = [
            {"op": "test", "path": "/status/epoch", "value": epoch},
            *({"op": "add", "path": f"/status/{name}", "value": value} for name, value in values.items()),
        ]
        try:
            await self._patch(change, PatchType.JSON)
        except InvalidObject:
            found = await self._server.get(SUPERVISIONS, self.name, self.namespace)
            known = _epoch(found)
            if known > epoch or found["metadata"].get("uid") != self.uid:
                raise Deposed(epoch, known) from None
            if known == epoch:
                raise
            await self._write_again(found, epoch, values)

    async def _write_again(self, found: KubernetesObject, epoch: int, values: Mapping[str, Any]) -> None:
        """Write into a resource that lost this epoch: its status was removed, or restored from a backup.

        Raises `Conflict` if another supervisor has written since `found` was read.
        """
        version = {"resourceVersion": found["metadata"]["resourceVersion"]}
        await self._patch({"metadata": version, "status": {"epoch": epoch, **values}}, PatchType.MERGE)

    async def stored(self) -> tuple[int, object]:
        """Return the epoch in the resource, and the last claim of an epoch that members had reported."""
        found = await self._server.get(SUPERVISIONS, self.name, self.namespace)
        return _epoch(found), _mapping(found.get("status")).get("claim")

    async def request_stop(self, how: str | None) -> None:
        """Record a user's request to stop the job, so that the next supervisor knows of it too.

        None removes an earlier one.
        """
        await self._server.patch(SUPERVISIONS, self.name, {"spec": {"stop": how}}, self.namespace)

    async def _patch(
        self, change: KubernetesObject | Sequence[KubernetesObject], how: PatchType
    ) -> KubernetesObject:
        return await self._server.patch(
            SUPERVISIONS, self.name, change, self.namespace, how=how, subresource="status"
        )


async def ensure(
    server: ApiServer, key: JobKey, members: int, nproc: int, settings: Mapping[str, str]
) -> SupervisionResource:
    """Create or update the resource of the job `key` with these numbers and settings, and return it.

    Raises `OwnerGone`, an `OSError`, if another owner still has the name.
    """
    spec = {"members": members, "nprocPerNode": nproc, "settings": dict(settings)}
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
            known = _owner(found)
            if known.get("kind") != key.kind:  # an owner of another kind has the same name
                continue
            if known.get("uid") != key.uid:  # usually it is being garbage-collected with its owner
                other = f"{known.get('apiVersion')} {key.kind} {known.get('name')}"
                raise OwnerGone(
                    f"the Supervision {name} belongs to {other} with the uid {known.get('uid')}"
                ) from None
            old = dict.fromkeys(_mapping(_mapping(found.get("spec")).get("settings")))  # null removes them
            change = {**spec, "settings": {**old, **settings}}
            await server.patch(SUPERVISIONS, name, {"spec": change}, key.namespace)
        return SupervisionResource(server, key.namespace, name)
    raise OwnerGone(f"both names for the Supervision of {key.name} belong to other owners")


async def has_ended(server: ApiServer, key: JobKey) -> bool:
    """Return True if the last run of the job `key` has ended, and its end is recorded for users as well."""
    for name in names(key):
        try:
            found = await server.get(SUPERVISIONS, name, key.namespace)
        except NotFound:
            continue
        if belongs_to(found, key):
            status = _mapping(found.get("status"))
            held = _held(status)
            return held is not None and held.memory.phase == "ended" and type(status.get("exitCode")) is int
    return False


def names(key: JobKey) -> tuple[str, str]:
    """Return the name of the job's resource, and the name to use if another owner has the first name."""
    return key.name, f"{key.name}-{key.kind.lower() or 'pods'}"


def belongs_to(found: KubernetesObject, key: JobKey) -> bool:
    """Return True if a Supervision belongs to the job `key`, and not to another owner of the same name."""
    owner = _owner(found)
    return (owner.get("kind") or "", owner.get("uid") or "") == (key.kind, key.uid)


def requests_only(found: KubernetesObject) -> KubernetesObject:
    """Return the parts of a Supervision that a mirror of all jobs needs: its owner and users' requests."""
    metadata, spec = found["metadata"], _mapping(found.get("spec"))
    owner = _mapping(spec.get("owner"))
    return {
        "metadata": {key: metadata[key] for key in _IDENTITY if key in metadata},
        "spec": {
            "owner": {key: owner[key] for key in ("kind", "uid") if key in owner},
            **{key: spec[key] for key in ("stop", "drill") if key in spec},
        },
    }


_IDENTITY = ("namespace", "name", "uid", "resourceVersion")


def is_news(old: KubernetesObject | None, new: KubernetesObject | None) -> bool:
    """True unless only other parts have changed, such as the status of every job every few seconds."""
    return old is None or new is None or _uid_and_spec(old) != _uid_and_spec(new)


def _uid_and_spec(found: KubernetesObject) -> tuple[object, object]:
    return found["metadata"].get("uid"), found.get("spec")


class SupervisionLead(Lead):
    """The right of this supervisor to act on one job; lost for good once another supervisor takes over.

    Its epoch is always one that this supervisor has written into the resource with a conditional write.
    """

    def __init__(self, epoch: int, resource: SupervisionResource, loop: asyncio.AbstractEventLoop) -> None:
        """Lead with the `epoch` that was taken over. `loop` runs the requests of `raise_above`."""
        super().__init__(epoch=epoch)
        self.deposed: Deposed | None = None
        self._resource, self._loop = resource, loop
        self._unsure: tuple[tuple[int, str], ...] = ()  # epochs that may have been taken, with their claims
        self._failed_s = -RAISE_AGAIN_S  # when an epoch could not be taken, on CLOCK_MONOTONIC

    def depose(self) -> Deposed:
        """Record that another supervisor has taken over the job, and return the exception that says so."""
        self.deposed = Deposed(self.epoch, self.epoch + 1)
        return self.deposed

    @contextmanager
    def acting(self) -> Iterator[None]:
        if self.deposed is not None:
            raise self.deposed
        yield

    def raise_above(self, known: int) -> None:
        """Take an epoch above `known`, which was found in a member's report or a checkpoint.

        Such an epoch may be that of a successor, which only the resource can tell. The epoch is therefore
        unchanged until the API server has accepted the higher one in place of it. Must be called in a thread
        other than the event loop's. Safe to repeat: for `RAISE_AGAIN_S` after a failure, it does nothing.

        Raises:
            Deposed: Another supervisor has taken over the job.
            OSError: The API server has not accepted the epoch.
        """
        if known < self.epoch or known > MAX_EPOCH:
            return
        with self.acting():
            if time.monotonic() < self._failed_s + RAISE_AGAIN_S:
                return
            try:
                in_loop(lambda: self._claim(known + 1), self._loop, RAISE_S)
            except Deposed:
                self.depose()
                raise
            except OSError:
                self._failed_s = time.monotonic()
                raise

    async def store(self, values: Mapping[str, Any]) -> None:
        """Set fields of the status. Raises `Deposed`, but not for an epoch that this process has taken."""
        expected = self.epoch
        try:
            await self._resource.write(expected, values)
        except Deposed:
            if expected == self.epoch and not await self._has_landed():
                raise
            await self._resource.write(self.epoch, values)

    async def _claim(self, epoch: int) -> None:
        """Write a higher epoch in place of the present one. Its claim tells it from a successor's."""
        claim = secrets.token_hex(8)
        self._unsure = (*self._unsure, (epoch, claim))[-MAX_UNSURE:]
        await self.store({"epoch": epoch, "claim": claim})
        self.epoch, self._unsure = epoch, ()

    async def _has_landed(self) -> bool:
        """Return True if the resource holds an earlier claim of this process whose answer was lost."""
        found = await self._resource.stored()
        if found not in self._unsure:
            return False
        self.epoch = found[0]
        self._unsure = tuple(each for each in self._unsure if each[0] > self.epoch)
        return True


class SupervisionLog:
    """Writes decisions into the resource from a thread other than the event loop's."""

    def __init__(self, lead: SupervisionLead, loop: asyncio.AbstractEventLoop) -> None:
        self._lead, self._loop = lead, loop

    def write(self, view: View, policy: Policy, action: RunAction, after: JobState, ledger: Any) -> None:
        """Store the job's state after a decision.

        Raises `OSError` if the state may not have been stored, and `Deposed` if another supervisor leads.
        """
        with self._lead.acting():
            values = _decided(after, ledger, type(action).__name__, str(getattr(action, "why", "")))
            try:
                in_loop(lambda: self._lead.store(values), self._loop, SAVE_S)
            except Deposed:
                self._lead.depose()
                raise

    def close(self) -> None:
        """Do nothing, because each write is a separate request."""


def in_loop(
    work: Callable[[], Coroutine[Any, Any, None]], loop: asyncio.AbstractEventLoop, limit_s: float
) -> None:
    """Run `work` in `loop`, and wait for it in another thread.

    `work` is called in the loop: a coroutine that a loop which ends never starts would be reported as lost.

    Raises what it raises, and `OSError` instead of `ApiError`, if it takes longer than `limit_s`, and if the
    loop has ended.
    """
    outcome: concurrent.futures.Future[None] = concurrent.futures.Future()
    started: list[asyncio.Task[None]] = []

    def finish(task: asyncio.Task[None]) -> None:
        error = OSError("the request was cancelled") if task.cancelled() else task.exception()
        if error is not None:
            outcome.set_exception(error)
        else:
            outcome.set_result(None)

    def start() -> None:
        task = loop.create_task(work())
        task.add_done_callback(finish)
        started.append(task)

    def give_up() -> None:
        for task in started:
            task.cancel()

    try:
        loop.call_soon_threadsafe(start)
        outcome.result(limit_s)
    except concurrent.futures.TimeoutError:  # before Python 3.11, it is not the built-in one
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(give_up)
        raise OSError(f"the API server has not responded for {limit_s:g} s") from None
    except ApiError as error:
        raise OSError(str(error)) from None
    except RuntimeError:
        if loop.is_closed():
            raise OSError("this supervisor is ending") from None
        raise


class SupervisionRecords:
    """The records of a job whose state is in a Supervision, and whose checkpoints its members list."""

    def __init__(
        self,
        resource: SupervisionResource,
        found: Takeover,
        make_index: Callable[[Callable[[], object]], CheckpointSource],
    ) -> None:
        loop = asyncio.get_running_loop()
        self.lead = SupervisionLead(found.epoch, resource, loop)
        self.held = None
        if found.state is not None:
            self.held = LastEntry(found.state.memory, found.state.ledger, None, found.epoch - 1)
        self._make_index = make_index
        self._log = SupervisionLog(self.lead, loop)

    async def write(self, values: Mapping[str, Any]) -> None:
        """Set fields of the status other than decisions. Raises what `SupervisionLead.store` raises."""
        await self.lead.store(values)

    def open_log(self) -> SupervisionLog:
        return self._log

    def checkpoints(self, changed: Callable[[], object]) -> CheckpointSource:
        return self._make_index(changed)


def here() -> Instant:
    """Return the current moment on this host's clocks."""
    return Instant(time.monotonic_ns(), time.time(), hostclock.identity())


def _decided(after: JobState, ledger: Any, decision: str, why: str) -> dict[str, Any]:
    return {
        "memory": held_state.encode(after, ledger, here()),
        "phase": after.phase,
        "generation": after.generation,
        "incidents": after.incidents,
        "decision": decision,
        "why": why[:MAX_INCIDENT_BYTES],
    }


def end(memory: JobState, ledger: Any) -> dict[str, Any]:
    """Return the status fields about a run that has ended: its last state, and its result for users."""
    message = memory.why[:MAX_INCIDENT_BYTES]
    return {
        **_decided(memory, ledger, Done.__name__, memory.why),
        "message": message,
        "exitCode": memory.exit_code,
    }


def summary(published: Mapping[str, Any], incidents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the status fields for users, from a published status and the last incidents."""
    last = published.get("last_incident") or (incidents[-1] if incidents else None)
    values = {
        "step": published.get("step"),
        "ettr": _percent(published.get("ettr")),
        "lastIncident": _line(last) if isinstance(last, Mapping) else "",
        "message": str(published.get("message") or "")[:MAX_INCIDENT_BYTES],
        "exitCode": published.get("exit_code"),
        "recent": [_bounded(each) for each in incidents[-MAX_RECENT:]],
    }
    found = {name: value for name, value in values.items() if value is not None}
    return {**found, "view": short_status.encode(published)}  # "" rather than one that is out of date


def announcement(memory: JobState) -> dict[str, Any]:
    """Return the status fields for users about a run that has not decided anything yet."""
    made = {"phase": memory.phase, "generation": memory.generation, "step": 0}
    return {**made, "exitCode": None, "message": "", "decision": "", "why": ""}


def _bounded(incident: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an incident in about `MAX_INCIDENT_BYTES`: stacks are dropped and long texts shortened."""
    for most in (1000, 300, 100):
        if _size(incident) <= MAX_INCIDENT_BYTES:
            break
        incident = {**_shortened(incident, most), "stacks": []}
    if _size(incident) <= MAX_INCIDENT_BYTES:
        return incident
    return {name: each for name, each in incident.items() if _size(each) <= MAX_FIELD_BYTES}


def _shortened(value: Any, most_bytes: int) -> Any:
    if isinstance(value, str):
        return shortened(value, most_bytes)
    if isinstance(value, list):
        return [_shortened(each, most_bytes) for each in value]
    if isinstance(value, Mapping):
        return {name: _shortened(each, most_bytes) for name, each in value.items()}
    return value


def _line(incident: Mapping[str, Any]) -> str:
    rank = incident.get("rank")
    where = f" of rank {rank}" if type(rank) is int and rank >= 0 else ""
    return f"{incident.get('id')}: {incident.get('kind')}{where} at step {incident.get('step')}"


def _percent(ettr: object) -> str | None:
    return f"{ettr:.1%}" if isinstance(ettr, float) else None


def _size(value: object) -> int:
    return len(json.dumps(value, separators=(",", ":")))


def _held(status: Mapping[str, Any]) -> HeldState | None:
    text = status.get("memory")
    if not isinstance(text, str) or not text:
        return None
    try:
        return held_state.decode(text, here())
    except held_state.UnreadableState as error:  # the job resumes from what members and storage hold
        log.error("the state in the resource cannot be read", extra={"error": str(error)})
        return None


def _epoch(found: KubernetesObject) -> int:
    known = _mapping(found.get("status")).get("epoch")
    return known if type(known) is int else 0


def _recent(status: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    found = status.get("recent")
    return tuple(each for each in found if isinstance(each, dict)) if isinstance(found, list) else ()


def _owner(found: KubernetesObject) -> Mapping[str, Any]:
    return _mapping(_mapping(found.get("spec")).get("owner"))


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}

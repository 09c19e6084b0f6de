"""Read and write a job's `Supervision`, which holds a summary, and the job's state for the next supervisor.

Every write tests that the resource still has this supervisor's epoch, including the write that takes a higher
epoch. A supervisor that was replaced can therefore change nothing, even if its requests arrive late.
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
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from holdfast.process import clock as hostclock
from holdfast.protocol.foreign_text import shortened
from supervisor.cluster import held_state
from supervisor.cluster.held_state import HeldState, Instant
from supervisor.cluster.job_membership import JobKey
from supervisor.cluster.untrusted_json import API_VERSION, NAME, UID, UnfitObject, matching
from supervisor.cluster.untrusted_json import KIND as OWNER_KIND
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
SAVE_S = 5.0  # the limit for writing a decision; the job does not wait for a slow write to end
TAKE_OVER_TRIES = 5  # attempts at a conditional write, which fails if another writer is faster
MAX_RECENT = 10  # incidents in the resource
MAX_INCIDENT_BYTES = 3 << 10
MAX_FIELD_BYTES = 200  # of each field of an incident that is too large even with shortened texts
DRILL_DONE = "carried out"  # the result of a drill that was not refused
RAISE_S = 1.5  # the limit for taking a higher epoch, because a decision waits for it
RAISE_AGAIN_S = 2.0  # until a failed attempt is repeated; decisions made before that do not wait
MAX_UNSURE = 16  # remembered claims of a new epoch whose response was lost


@dataclass(frozen=True, slots=True)
class Takeover:
    """What a supervisor finds in the resource when it takes over a job. `state` is None for a new job."""

    epoch: int
    state: HeldState | None
    view: Mapping[str, Any] | None  # the last published status
    recent: tuple[Mapping[str, Any], ...]  # the last incidents
    spec: Mapping[str, Any] = field(default_factory=dict, compare=False)  # describes the run in `state`


class RunSize(NamedTuple):
    """The number of members with which a run trains, and the number of ranks of each member."""

    members: int
    nproc: int

    def __str__(self) -> str:
        return f"{self.members} members of {self.nproc} ranks"

    @classmethod
    def of(cls, memory: JobState) -> RunSize:
        return cls(memory.world_size // max(1, memory.nproc), max(0, memory.nproc))


@dataclass(frozen=True, slots=True)
class OngoingRun:
    """A run that has not ended, as its Supervision describes it to the next leader."""

    key: JobKey
    uid: object  # of the Supervision
    size: RunSize
    settings: Mapping[str, str]
    members: tuple[str, ...]  # that had ranks or were present, including lost ones; those with ranks first


class OwnerGone(OSError):
    """The Supervision with this name belongs to another owner, which is usually gone. Try again later."""


class SupervisionResource:
    """The resource of one job. All methods can raise `ApiError` or `ServerUnreachable`, an `OSError`."""

    def __init__(self, server: ApiServer, namespace: str, name: str) -> None:
        self.namespace, self.name = namespace, name
        self._server = server
        self.uid: object = None  # the uid of the resource that was taken over

    async def take_over(self, least_epoch: int) -> Takeover:
        """Claim an epoch, and return the contents of the resource.

        The epoch is above all earlier ones, and at least `least_epoch`. Raises `Conflict` if the resource
        changes during each of `TAKE_OVER_TRIES` attempts.
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
            view = short_status.decode(status.get("view"))
            return Takeover(epoch, _held(status), view, _recent(status), _mapping(found.get("spec")))
        raise AssertionError("unreachable")

    async def describe(
        self, epoch: int, before: Mapping[str, Any], size: RunSize, settings: Mapping[str, str]
    ) -> None:
        """Write the size and the settings of a run that begins into the spec, which is `before`.

        Until the run ends, each supervisor reads them there, whatever the pods state meanwhile. Raises
        `Deposed` if another supervisor has taken over the job.
        """
        spec = _described(size, settings)
        if {name: before.get(name) for name in spec} != spec:
            await self._change_spec(epoch, [_set("spec", name, each) for name, each in spec.items()])

    async def write(self, epoch: int, values: Mapping[str, Any]) -> None:
        """Set fields of the status. Raises `Deposed` if another supervisor has taken over the job."""
        change = [_still(epoch), *(_set("status", name, value) for name, value in values.items())]
        try:
            await self._patch(change, PatchType.JSON)
        except InvalidObject:
            found = await self._find_successor(epoch)
            if _epoch(found) == epoch:
                raise
            await self._write_again(found, epoch, values)

    async def _find_successor(self, epoch: int) -> KubernetesObject:
        """Return the resource, after the API server refused a write with `epoch`.

        Raises `Deposed` if another supervisor has taken over the job.
        """
        found = await self._server.get(SUPERVISIONS, self.name, self.namespace)
        known = _epoch(found)
        if known > epoch or found["metadata"].get("uid") != self.uid:
            raise Deposed(epoch, known) from None
        return found

    async def _change_spec(self, epoch: int, change: Sequence[KubernetesObject]) -> None:
        try:
            await self._server.patch(
                SUPERVISIONS, self.name, [_still(epoch), *change], self.namespace, how=PatchType.JSON
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
        """Return the epoch in the resource, and the claim with which it was last raised."""
        found = await self._server.get(SUPERVISIONS, self.name, self.namespace)
        return _epoch(found), _mapping(found.get("status")).get("claim")

    async def request_stop(self, epoch: int, how: str | None) -> None:
        """Record a user's request to stop the job, so that the next supervisor also knows about it.

        None removes an earlier request. Raises `Deposed` if another supervisor has taken over the job: the
        request may be for an earlier run than the one that this supervisor knows.
        """
        change = [_set("spec", "stop", how or "now")]
        if how is None:  # a field that is not there cannot be removed, so set it first
            change.append({"op": "remove", "path": "/spec/stop"})
        await self._change_spec(epoch, change)

    async def _patch(
        self, change: KubernetesObject | Sequence[KubernetesObject], how: PatchType
    ) -> KubernetesObject:
        return await self._server.patch(
            SUPERVISIONS, self.name, change, self.namespace, how=how, subresource="status"
        )


async def ensure(
    server: ApiServer, key: JobKey, size: RunSize, settings: Mapping[str, str]
) -> SupervisionResource:
    """Return the resource of the job `key`. If there is none, create it with this size and these settings.

    Raises `OwnerGone`, an `OSError`, if the resource with that name still belongs to another owner.
    """
    spec = _described(size, settings)
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
            if known.get("uid") != key.uid:  # the resource is usually being garbage-collected with its owner
                other = f"{known.get('apiVersion')} {key.kind} {known.get('name')}"
                raise OwnerGone(
                    f"the Supervision {name} belongs to {other} with the uid {known.get('uid')}"
                ) from None
        return SupervisionResource(server, key.namespace, name)
    raise OwnerGone(f"both names for the Supervision of {key.name} belong to other owners")


async def has_ended(server: ApiServer, key: JobKey) -> bool:
    """Return True if the last run of the job `key` has ended, and its end was also recorded for users."""
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
    """Return the name of the job's resource, and the name to use if the first belongs to another owner."""
    return key.name, f"{key.name}-{key.kind.lower() or 'pods'}"


def belongs_to(found: KubernetesObject, key: JobKey) -> bool:
    """Return True if a Supervision belongs to the job `key`, and not to another owner with the same name."""
    owner = _owner(found)
    return (owner.get("kind") or "", owner.get("uid") or "") == (key.kind, key.uid)


def ongoing_run(found: KubernetesObject) -> OngoingRun | None:
    """Return the run in a Supervision; None if it has none, or if its run has ended.

    The status is written only by supervisors. Users can edit the spec, so a key that does not match the name
    of the resource is refused: it would add the pods of this job to another one.
    """
    status, spec = _mapping(found.get("status")), _mapping(found.get("spec"))
    key, held = _key_of(found), _held(status) if status.get("phase") != "ended" else None
    if key is None or status.get("phase") in (None, "ended"):
        return None
    if held is not None and held.memory.phase != "ended":
        size, trained = RunSize.of(held.memory), (*held.memory.placement, *held.memory.lost)
    else:  # the run has not decided anything yet
        size, trained = RunSize(*(_count(spec.get(name)) for name in ("members", "nprocPerNode"))), ()
    shown = _mapping(short_status.decode(status.get("view"))).get("members")
    present = [_mapping(each).get("name") for each in shown] if isinstance(shown, list) else []
    members = dict.fromkeys((*trained, *(name for name in present if isinstance(name, str))))
    if not members or not all(size):
        return None
    return OngoingRun(key, found["metadata"].get("uid"), size, settings_of(spec), tuple(members))


def _count(value: object) -> int:
    return value if type(value) is int and value > 0 else 0


def settings_of(spec: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings in a spec, without values that are no texts."""
    found = _mapping(spec.get("settings"))
    return {name: text for name, text in found.items() if isinstance(text, str)}


def _key_of(found: KubernetesObject) -> JobKey | None:
    """Return the job of a Supervision; None if its owner does not match its name."""
    owner, metadata = _owner(found), found["metadata"]
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
    """The right of this supervisor to act on one job, which ends when another supervisor takes over.

    `epoch` is always an epoch that this supervisor has written into the resource with a conditional write.
    """

    def __init__(self, epoch: int, resource: SupervisionResource, loop: asyncio.AbstractEventLoop) -> None:
        """`epoch` is the one with which the job was taken over. `loop` runs the requests of `raise_above`."""
        super().__init__(epoch=epoch)
        self.deposed: Deposed | None = None
        self._resource, self._loop = resource, loop
        self._unsure: tuple[tuple[int, str], ...] = ()  # epochs that may have been taken, with their claims
        self._failed_s = -RAISE_AGAIN_S  # when the last attempt to take an epoch failed, by CLOCK_MONOTONIC

    def depose(self) -> Deposed:
        """Record that another supervisor has taken over the job, and return the exception to raise."""
        self.deposed = Deposed(self.epoch, self.epoch + 1)
        return self.deposed

    @contextmanager
    def acting(self) -> Iterator[None]:
        if self.deposed is not None:
            raise self.deposed
        yield

    def raise_above(self, known: int) -> None:
        """Take an epoch above `known`, which was found in a member's report or a checkpoint.

        The epoch `known` may belong to a successor, and only the resource shows whether it does. This
        supervisor's epoch therefore remains unchanged until the API server has accepted the higher one. Call
        this in a thread other than the event loop's. Safe to repeat; for `RAISE_AGAIN_S` after a failure,
        calls do nothing.

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
        """Set fields of the status. Raises `Deposed`, unless this process itself took the newer epoch."""
        expected = self.epoch
        try:
            await self._resource.write(expected, values)
        except Deposed:
            if expected == self.epoch and not await self._has_landed():
                raise
            await self._resource.write(self.epoch, values)

    async def _claim(self, epoch: int) -> None:
        """Write a higher epoch, with a claim that distinguishes it from a successor's epoch."""
        claim = secrets.token_hex(8)
        self._unsure = (*self._unsure, (epoch, claim))[-MAX_UNSURE:]
        await self.store({"epoch": epoch, "claim": claim})
        self.epoch, self._unsure = epoch, ()

    async def _has_landed(self) -> bool:
        """Return True if the resource contains a claim of this process whose response was lost."""
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

        Raises `OSError` if it is not certain that the state was stored, and `Deposed` if another supervisor
        leads.
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

    The coroutine is created in the loop. If it were created here and the loop ended before it started, Python
    would warn that it was never awaited.

    Raises the exceptions of `work`, with `OSError` in place of `ApiError`. Also raises `OSError` if `work`
    takes longer than `limit_s`, or if the loop has ended.
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
    except concurrent.futures.TimeoutError:  # before Python 3.11, this differs from the built-in TimeoutError
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
    """The records of a job on a cluster: the state in its Supervision, and the checkpoints in storage."""

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


def _described(size: RunSize, settings: Mapping[str, str]) -> dict[str, Any]:
    return {"members": size.members, "nprocPerNode": size.nproc, "settings": dict(settings)}


def _still(epoch: int) -> dict[str, Any]:
    """Return the condition that no other supervisor has taken over the job, for a JSON patch."""
    return {"op": "test", "path": "/status/epoch", "value": epoch}


def _set(part: str, name: str, value: object) -> dict[str, Any]:
    return {"op": "add", "path": f"/{part}/{name}", "value": value}


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
    """Return the status fields for a run that has ended: its last state, and its result for users."""
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
    return {**found, "view": short_status.encode(published)}  # "" if it is too large, never an outdated one


def announcement(memory: JobState) -> dict[str, Any]:
    """Return the status fields for users at the start of a run, before its first decision."""
    made = {"phase": memory.phase, "generation": memory.generation, "step": 0}
    return {**made, "exitCode": None, "message": "", "decision": "", "why": ""}


def _bounded(incident: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an incident in about `MAX_INCIDENT_BYTES`, without stacks and with long texts shortened."""
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
    except held_state.UnreadableState as error:  # the job resumes from members' or storage's states
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

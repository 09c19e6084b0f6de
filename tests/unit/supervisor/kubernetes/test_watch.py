"""A mirror resumes, lists again, notices silence, and never goes back; in simulated time."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from supervisor.kubernetes.client import KubernetesObject, Listing, ResourceKind, WatchEvent
from supervisor.kubernetes.errors import Forbidden, Gone, ServerUnreachable, WatchStalled
from supervisor.kubernetes.watch import MAX_BACKOFF_S, Mirror, ObjectName, drop_bookkeeping
from tests.unit.supervisor.kubernetes.simulated_time import now_s, simulated

PODS = ResourceKind("", "v1", "pods")
RESET = ServerUnreachable("WATCH pods", "connection reset")
GONE = Gone("WATCH pods", "too old resource version", 410)
QUIET = 300.0  # as long as a watch lasts
Step = WatchEvent | Exception | float


def pod(name: str, version: int, **more: Any) -> dict[str, Any]:
    metadata = {"namespace": "ns", "name": name, "resourceVersion": str(version), **more}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata}


def event(verb: str, name: str, version: int) -> WatchEvent:
    return WatchEvent(verb, pod(name, version))


def bookmark(version: int) -> WatchEvent:
    return WatchEvent("BOOKMARK", {"metadata": {"resourceVersion": str(version)}})


class ScriptedServer:
    """Answers each list and watch from a script. The steps of a watch are events, errors and seconds."""

    def __init__(self, lists: Sequence[Listing | Exception], watches: Sequence[Sequence[Step]]) -> None:
        self.lists, self.watches = deque(lists), deque(watches)
        self.calls: list[str] = []
        self.called_s: list[float] = []
        self.queries: set[tuple[str, str, str]] = set()

    async def list(
        self,
        kind: ResourceKind,
        namespace: str = "",
        *,
        labels: str = "",
        fields: str = "",
        prune: Callable[[KubernetesObject], KubernetesObject] = lambda each: each,
    ) -> Listing:
        self._note("list", namespace, labels, fields)
        answer = self.lists.popleft() if len(self.lists) > 1 else self.lists[0]
        if isinstance(answer, Exception):
            raise answer
        return Listing(tuple(prune(each) for each in answer.objects), answer.version)

    @asynccontextmanager
    async def watch(
        self, kind: ResourceKind, since: str, namespace: str = "", *, labels: str = "", fields: str = ""
    ) -> AsyncIterator[AsyncIterator[WatchEvent]]:
        self._note(f"watch {since}", namespace, labels, fields)
        steps = self.watches.popleft() if self.watches else [1e6]
        yield self._play(steps)

    async def _play(self, steps: Sequence[Step]) -> AsyncIterator[WatchEvent]:
        for each in steps:
            if isinstance(each, Exception):
                raise each
            if isinstance(each, float):
                await asyncio.sleep(each)
            else:
                yield each

    def _note(self, call: str, *query: str) -> None:
        self.calls.append(call)
        self.called_s.append(now_s())
        self.queries.add((query[0], query[1], query[2]))


class Changes(list[tuple[str, str | None, str | None]]):
    """The changes that a mirror reported: name, old version, new version."""

    def __call__(self, name: ObjectName, old: KubernetesObject | None, new: KubernetesObject | None) -> None:
        before, after = [None if each is None else each["metadata"]["resourceVersion"] for each in (old, new)]
        self.append((name.name, before, after))


async def mirror_for(seconds: float, server: ScriptedServer, **options: Any) -> tuple[Mirror, Changes]:
    changes = Changes()
    mirror = Mirror(server, PODS, changes, jitter=lambda: 1.0, **options)
    running = asyncio.ensure_future(mirror.run())
    await asyncio.wait({running}, timeout=seconds)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    return mirror, changes


def names(mirror: Mirror) -> set[str]:
    return {each.name for each in mirror.objects}


def listing(version: int, *objects: KubernetesObject) -> Listing:
    return Listing(objects, str(version))


@simulated
async def test_the_mirror_lists_then_resumes_at_the_last_version_it_received() -> None:
    server = ScriptedServer(
        [listing(100, pod("a", 90))],
        [
            [event("ADDED", "b", 101), event("DELETED", "a", 102), bookmark(140), QUIET],
            [event("MODIFIED", "b", 141), QUIET],
            [QUIET, QUIET],
        ],
    )
    mirror, changes = await mirror_for(700, server)
    assert server.calls == ["list", "watch 100", "watch 140", "watch 141"]
    assert names(mirror) == {"b"}
    assert changes == [("a", None, "90"), ("b", None, "101"), ("a", "90", None), ("b", "101", "141")]
    assert server.called_s[2] == pytest.approx(server.called_s[0] + 300)  # as soon as a watch has ended


@pytest.mark.parametrize("steps", [[GONE], [event("ADDED", "b", 101), GONE]])
@simulated
async def test_the_mirror_lists_again_when_history_has_expired_and_reports_only_differences(
    steps: list[Step],
) -> None:
    again = listing(200, pod("a", 90), pod("c", 150))
    server = ScriptedServer([listing(100, pod("a", 90), pod("b", 91)), again], [steps, [1e6]])
    mirror, changes = await mirror_for(10, server)
    assert server.calls == ["list", "watch 100", "list", "watch 200"]
    assert names(mirror) == {"a", "c"}
    assert changes[-2:] == [("b", "101" if len(steps) > 1 else "91", None), ("c", None, "150")]


@simulated
async def test_the_mirror_lists_again_after_silence() -> None:
    """After its store was restored, the server may wait for a version that it has not reached yet."""
    silent = WatchStalled("WATCH pods", "silent for too long")
    server = ScriptedServer(
        [listing(1000, pod("a", 990)), listing(500, pod("b", 400))], [[130.0, silent], [1e6]]
    )
    mirror, _ = await mirror_for(140, server)
    assert server.calls == ["list", "watch 1000", "list", "watch 500"]
    assert names(mirror) == {"b"}


@simulated
async def test_a_broken_connection_is_resumed_without_a_new_list() -> None:
    server = ScriptedServer([listing(100)], [[event("ADDED", "a", 101), RESET], [RESET], [1e6]])
    mirror, _ = await mirror_for(20, server)
    assert server.calls == ["list", "watch 100", "watch 101", "watch 101"]
    assert names(mirror) == {"a"}


@simulated
async def test_the_pause_between_attempts_grows_up_to_a_bound_and_is_reset_by_a_success() -> None:
    server = ScriptedServer(
        [listing(100)], [[RESET] for _ in range(12)] + [[event("ADDED", "a", 101), RESET]]
    )
    await mirror_for(300, server)
    waits = [two - one for one, two in itertools.pairwise(server.called_s)]
    assert waits[:7] == pytest.approx([0, 0, 1, 2, 4, 8, 16])
    assert max(waits) == MAX_BACKOFF_S
    assert waits[-1] == pytest.approx(0)


@simulated
async def test_a_server_that_ends_each_watch_at_once_does_not_cause_a_busy_loop() -> None:
    server = ScriptedServer([listing(100)], [[] for _ in range(1000)])
    await mirror_for(100, server)
    assert len(server.calls) < 12


@simulated
async def test_repeatedly_expired_history_does_not_cause_a_busy_loop() -> None:
    server = ScriptedServer([listing(100)], [[GONE] for _ in range(1000)])
    await mirror_for(100, server)
    assert len(server.calls) < 24


@simulated
async def test_while_the_server_refuses_or_is_away_the_copy_is_kept() -> None:
    no = Forbidden("GET pods", "pods is forbidden", 403)
    server = ScriptedServer([listing(100, pod("a", 90)), no], [[GONE], [1e6]])
    mirror, _ = await mirror_for(60, server)
    assert names(mirror) == {"a"}
    assert "forbidden" in mirror.problem
    assert mirror.silent_s >= 59


@simulated
async def test_a_failed_first_list_is_retried() -> None:
    no = Forbidden("GET pods", "not yet", 403)
    server = ScriptedServer([no, RESET, listing(100, pod("a", 90))], [])
    mirror, _ = await mirror_for(20, server)
    assert mirror.synced.is_set()
    assert mirror.problem == ""


@simulated
async def test_the_mirror_is_synced_only_once_the_list_is_complete_and_reported() -> None:
    seen: list[tuple[bool, int]] = []
    server = ScriptedServer([listing(100, pod("a", 90), pod("b", 91))], [])
    mirror = Mirror(
        server, PODS, lambda name, old, new: seen.append((mirror.synced.is_set(), len(mirror.objects)))
    )
    assert mirror.silent_s == float("inf")
    running = asyncio.ensure_future(mirror.run())
    await mirror.synced.wait()
    assert seen == [(False, 2), (False, 2)]
    running.cancel()


@simulated
async def test_an_event_older_than_the_copy_is_ignored() -> None:
    """A server that lags behind or repeats events must not bring a deleted object back."""
    steps: list[Step] = [
        event("MODIFIED", "a", 120),
        event("MODIFIED", "a", 110),
        event("DELETED", "a", 121),
        event("MODIFIED", "a", 119),
        bookmark(105),
        RESET,
    ]
    server = ScriptedServer([listing(100, pod("a", 90))], [steps])
    mirror, changes = await mirror_for(10, server)
    assert names(mirror) == set()
    assert changes == [("a", None, "90"), ("a", "90", "120"), ("a", "120", None)]
    assert server.calls[-1] == "watch 121"


@simulated
async def test_a_store_restored_from_a_backup_is_accepted() -> None:
    server = ScriptedServer(
        [listing(1000, pod("a", 990)), listing(500, pod("a", 400))], [[GONE], [event("ADDED", "b", 501), 1e6]]
    )
    mirror, changes = await mirror_for(10, server)
    assert changes == [("a", None, "990"), ("a", "990", "400"), ("b", None, "501")]
    assert names(mirror) == {"a", "b"}


@simulated
async def test_selectors_and_namespace_are_in_every_request() -> None:
    server = ScriptedServer([listing(100)], [[GONE], [RESET]])
    await mirror_for(10, server, namespace="ns", labels="app=x", fields="spec.nodeName=n")
    assert server.queries == {("ns", "app=x", "spec.nodeName=n")}


@simulated
async def test_a_view_of_the_objects_stays_valid_while_nothing_changes() -> None:
    server = ScriptedServer(
        [listing(100, pod("a", 90)), listing(200, pod("b", 150))],
        [[10.0, GONE], [event("ADDED", "c", 201), 1e6]],
    )
    mirror = Mirror(server, PODS)
    view = mirror.objects
    running = asyncio.ensure_future(mirror.run())
    await mirror.synced.wait()
    assert {each.name for each in view} == {"a"}
    await asyncio.sleep(30)
    assert {each.name for each in view} == {"b", "c"}
    running.cancel()


@simulated
async def test_objects_are_pruned_however_they_arrive() -> None:
    bulky = {"managedFields": [{}], "annotations": {"kubectl.kubernetes.io/last-applied-configuration": "x"}}
    server = ScriptedServer(
        [listing(100, pod("a", 90, **bulky))], [[WatchEvent("ADDED", pod("b", 101, **bulky)), 1e6]]
    )
    mirror, _ = await mirror_for(10, server)
    kept = [each["metadata"] for each in mirror.objects.values()]
    assert [each["annotations"] for each in kept] == [{}, {}]
    assert not any("managedFields" in each for each in kept)


@simulated
async def test_each_list_is_announced_before_its_objects_are_pruned() -> None:
    server = ScriptedServer([listing(100, pod("a", 90)), RESET, listing(200)], [[GONE]])
    notes: list[str] = []

    def prune(found: KubernetesObject) -> KubernetesObject:
        notes.append(found["metadata"]["name"])
        return found

    await mirror_for(10, server, prune=prune, listing=lambda: notes.append("list"))
    assert notes == ["list", "a", "list", "list"]


def test_pruning_does_not_change_the_original_or_other_fields() -> None:
    found = pod("a", 1, annotations={"mine": "x"}, managedFields=[1])
    assert drop_bookkeeping(found) == pod("a", 1, annotations={"mine": "x"})
    assert found["metadata"]["managedFields"] == [1]


@simulated
async def test_an_exception_in_a_callback_ends_the_mirror() -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        await Mirror(ScriptedServer([listing(100, pod("a", 90))], []), PODS, fail).run()


@simulated
async def test_a_reconnected_mirror_has_no_problem() -> None:
    server = ScriptedServer([listing(100)], [[RESET] for _ in range(5)] + [[1e6]])
    mirror, _ = await mirror_for(60, server)
    assert mirror.problem == ""
    assert mirror.silent_s < 60

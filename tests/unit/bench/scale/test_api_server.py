"""The API server of the scale bench, as the supervisor's own client sees it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from bench.scale import cluster_objects
from bench.scale.api_server import ObjectStore, SimulatedApi
from supervisor.admission.pod_layout import AUDIENCE
from supervisor.cluster.jobs import MEMBERS
from supervisor.cluster.supervision.contents import SUPERVISIONS
from supervisor.kubernetes.access import ServerAccess
from supervisor.kubernetes.client import PODS, ApiServer, PatchType
from supervisor.kubernetes.errors import AlreadyThere, Conflict, InvalidObject
from supervisor.kubernetes.identity import Caller, TokenRefused, TokenReviewer
from supervisor.kubernetes.lease import LEASES


class NoToken:
    async def header(self) -> str:
        return ""

    async def renew(self, refused: str) -> bool:
        return False


@asynccontextmanager
async def serving(jobs: int = 3, members: int = 260) -> AsyncIterator[tuple[ObjectStore, ApiServer]]:
    store = ObjectStore()
    for owner, pods in cluster_objects.workloads(jobs, members, 2):
        store.put("jobs", owner)
        for pod in pods:
            store.put("pods", pod)
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", SimulatedApi(store).serve)
    async with TestServer(app) as server:
        access = ServerAccess(str(server.make_url("")).rstrip("/"), NoToken())
        async with ApiServer(access) as client:
            yield store, client


def supervision(name: str, **status: Any) -> dict[str, Any]:
    return {"metadata": {"name": name}, "spec": {"members": 2}, "status": status}


async def test_a_list_is_complete_although_it_is_read_in_pages() -> None:
    async with serving() as (_, client):
        found = await client.list(PODS, labels=MEMBERS)
        assert len({each["metadata"]["uid"] for each in found.objects}) == 260
        assert not (await client.list(PODS, labels=f"!{MEMBERS.partition('=')[0]}")).objects


async def test_a_watch_delivers_the_writes_after_a_version() -> None:
    async with serving() as (_, client):
        since = (await client.list(SUPERVISIONS)).version
        await client.create(SUPERVISIONS, supervision("a", epoch=1), "team")
        async with client.watch(SUPERVISIONS, since) as events:
            first = await anext(events)
            assert (first.verb, first.object["metadata"]["name"]) == ("ADDED", "a")
            assert "status" not in first.object
            await client.patch(SUPERVISIONS, "a", {"status": {"epoch": 4}}, "team", subresource="status")
            second = await anext(events)
            assert (second.verb, second.object["status"]) == ("MODIFIED", {"epoch": 4})


async def test_conditions_are_tested_before_anything_is_written() -> None:
    async with serving() as (store, client):
        made = await client.create(SUPERVISIONS, supervision("a"), "team")
        with pytest.raises(AlreadyThere):
            await client.create(SUPERVISIONS, supervision("a"), "team")
        old = {"metadata": {"resourceVersion": made["metadata"]["resourceVersion"]}}
        change = {**old, "status": {"epoch": 1}}
        await client.patch(SUPERVISIONS, "a", change, "team", subresource="status")
        with pytest.raises(Conflict):
            await client.patch(SUPERVISIONS, "a", change, "team", subresource="status")
        for epoch, refused in ((1, False), (0, True)):
            test = {"op": "test", "path": "/status/epoch", "value": epoch}
            add = {"op": "add", "path": "/status/step", "value": epoch}
            written = client.patch(
                SUPERVISIONS, "a", [test, add], "team", how=PatchType.JSON, subresource="status"
            )
            if refused:
                with pytest.raises(InvalidObject):
                    await written
            else:
                await written
        assert store.get("supervisions", "team", "a")["status"] == {"epoch": 1, "step": 1}
        assert store.get("supervisions", "team", "a")["spec"] == {"members": 2}


async def test_a_lease_is_replaced_only_at_its_version() -> None:
    async with serving() as (_, client):
        made = await client.create(LEASES, {"metadata": {"name": "l"}, "spec": {}}, "team")
        await client.replace(LEASES, {**made, "spec": {"holderIdentity": "a"}})
        with pytest.raises(Conflict):
            await client.replace(LEASES, {**made, "spec": {"holderIdentity": "b"}})


async def test_a_token_names_its_pod() -> None:
    async with serving() as (_, client):
        reviewer = TokenReviewer(client, AUDIENCE)
        uid = cluster_objects.pod_uid(2, 1)
        found = await reviewer.review(cluster_objects.token_of(uid))
        assert isinstance(found, Caller)
        assert found.pod_uid == uid
        assert isinstance(await reviewer.review("another.token.x"), TokenRefused)

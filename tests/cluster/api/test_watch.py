"""A mirror of a collection on a real server, through lost history and broken connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from urllib.parse import urlsplit

import pytest

from supervisor.kubernetes.client import ApiServer, KubernetesObject
from supervisor.kubernetes.watch import Mirror, ObjectName
from tests.cluster.api.kinds import CONFIG_MAPS, config_map

pytestmark = pytest.mark.cluster
LIMIT_S = 30.0


class Copy:
    """A mirror of the labelled ConfigMaps, which a test can wait on."""

    def __init__(self, api: ApiServer, namespace: str) -> None:
        self.changes: list[tuple[str, bool, bool]] = []
        self.mirror = Mirror(api, CONFIG_MAPS, self._changed, namespace=namespace, labels="test=yes")
        self._changed_once = asyncio.Event()

    def _changed(self, name: ObjectName, old: KubernetesObject | None, new: KubernetesObject | None) -> None:
        self.changes.append((name.name, old is not None, new is not None))
        self._changed_once.set()

    @property
    def contents(self) -> dict[str, str]:
        return {key.name: each.get("data", {}).get("x", "") for key, each in self.mirror.objects.items()}

    async def until(self, condition: Callable[[dict[str, str]], bool]) -> None:
        async def wait() -> None:
            while not condition(self.contents):
                self._changed_once.clear()
                await self._changed_once.wait()

        await asyncio.wait_for(wait(), LIMIT_S)


async def test_a_mirror_follows_creations_changes_and_deletions(api: ApiServer, namespace: str) -> None:
    await api.create(CONFIG_MAPS, config_map(namespace, "before", x="1"), namespace)
    copy = Copy(api, namespace)
    running = asyncio.ensure_future(copy.mirror.run())
    await asyncio.wait_for(copy.mirror.synced.wait(), LIMIT_S)
    assert copy.contents == {"before": "1"}
    await api.create(CONFIG_MAPS, config_map(namespace, "a", x="1"), namespace)
    await api.patch(CONFIG_MAPS, "a", {"data": {"x": "2"}}, namespace)
    await api.patch(CONFIG_MAPS, "before", {"metadata": {"labels": {"test": "no"}}}, namespace)
    await copy.until({"a": "2"}.__eq__)
    await api.delete(CONFIG_MAPS, "a", namespace)
    await copy.until({}.__eq__)
    running.cancel()
    await asyncio.wait({running})
    assert not any("managedFields" in each["metadata"] for each in copy.mirror.objects.values())


class Relay:
    """A TCP relay to the API server. A test can cut its connections, or freeze them while they stay open."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._connections: dict[asyncio.Task[None] | None, list[asyncio.StreamWriter]] = {}
        self._frozen = 0  # connections up to this number
        self.count = 0

    async def start(self) -> int:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1")
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def close(self) -> None:
        self._server.close()
        self.cut()
        await self._server.wait_closed()
        await asyncio.gather(*(each for each in self._connections if each is not None))

    def cut(self) -> None:
        for ends in self._connections.values():
            for end in ends:
                end.transport.abort()

    def freeze(self) -> None:
        """Freeze all existing connections. New ones work."""
        self._frozen = self.count

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.count += 1
        number = self.count
        there, back = await asyncio.open_connection(*self._target)
        task = asyncio.current_task()
        self._connections[task] = [writer, back]
        await asyncio.gather(self._pump(reader, back, number), self._pump(there, writer, number))
        del self._connections[task]

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        try:
            while piece := await reader.read(1 << 16):
                if number > self._frozen:
                    writer.write(piece)
        except OSError:
            pass
        writer.transport.abort()


@pytest.fixture
async def relay(api: ApiServer) -> AsyncIterator[tuple[Relay, ApiServer]]:
    """Yield a relay and a client behind it. The client treats three silent seconds as the end of a watch."""
    target = urlsplit(api._access.url)
    assert target.hostname is not None
    assert target.port is not None
    made = Relay(target.hostname, target.port)
    url = f"https://127.0.0.1:{await made.start()}"
    access = replace(api._access, url=url, server_name=target.hostname)
    async with ApiServer(access, stall_s=3.0) as behind:
        yield made, behind
        await made.close()


def has_followed(number: int, found: dict[str, str]) -> bool:
    """Return True if a mirror has the changes of this round."""
    return found.get("a") == found.get(f"b{number}") == str(number)


@pytest.mark.parametrize("how", ["cut", "freeze"])
async def test_a_connection_that_breaks_loses_no_event(
    api: ApiServer, namespace: str, relay: tuple[Relay, ApiServer], how: str
) -> None:
    line, behind = relay
    await api.create(CONFIG_MAPS, config_map(namespace, "a", x="0"), namespace)
    copy = Copy(behind, namespace)
    running = asyncio.ensure_future(copy.mirror.run())
    await copy.until({"a": "0"}.__eq__)
    for n in range(1, 4):
        line.cut() if how == "cut" else line.freeze()
        await api.create(CONFIG_MAPS, config_map(namespace, f"b{n}", x=str(n)), namespace)
        await api.patch(CONFIG_MAPS, "a", {"data": {"x": str(n)}}, namespace)
        await copy.until(partial(has_followed, n))
    await api.delete(CONFIG_MAPS, "a", namespace)
    await copy.until(lambda found: "a" not in found)
    running.cancel()
    await asyncio.wait({running})
    assert line.count >= 4


async def test_a_mirror_whose_version_the_server_has_forgotten_lists_again(
    api: ApiServer, namespace: str
) -> None:
    await api.create(CONFIG_MAPS, config_map(namespace, "a", x="1"), namespace)
    copy = Copy(api, namespace)
    copy.mirror._since = "1"  # forgotten or the first one: the mirror ends up complete
    running = asyncio.ensure_future(copy.mirror.run())
    await copy.until({"a": "1"}.__eq__)
    await api.delete(CONFIG_MAPS, "a", namespace)
    await copy.until({}.__eq__)
    running.cancel()
    await asyncio.wait({running})

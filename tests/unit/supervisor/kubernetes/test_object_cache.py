"""Objects are read in the background: no failure forgets one, and no kind delays another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import pytest

from supervisor.kubernetes import object_cache
from supervisor.kubernetes.client import ApiServer, KubernetesObject, ResourceKind
from supervisor.kubernetes.errors import Forbidden, NotFound, ServerUnreachable
from supervisor.kubernetes.object_cache import FRESH_S, PER_KIND, RETRY_S, ObjectCache

LIMIT_S = 20.0


class Reference(NamedTuple):
    api_version: str
    kind: str
    namespace: str
    name: str
    uid: str


def job(name: str = "a", uid: str = "u") -> Reference:
    return Reference("batch/v1", "Job", "team", name, uid)


class Answers(ApiServer):
    """Answers each request as the test specifies."""

    def __init__(self) -> None:
        self.waiting: dict[str, asyncio.Future[KubernetesObject]] = {}  # by plural and name
        self.asked: list[str] = []
        self.changed = asyncio.Event()

    async def get(
        self, kind: ResourceKind, name: str, namespace: str = "", *, subresource: str = ""
    ) -> KubernetesObject:
        self.asked.append(f"{kind.plural} {name}")
        answer: asyncio.Future[KubernetesObject] = asyncio.get_running_loop().create_future()
        self.waiting[f"{kind.plural} {name}"] = answer
        self.changed.set()
        return await answer

    async def answer(self, name: str, answer: Any) -> None:
        """Answer a request, and return once the cache has noticed."""
        await self.until(lambda: name in self.waiting)
        future = self.waiting.pop(name)
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)
        for _ in range(5):
            await asyncio.sleep(0)

    async def until(self, condition: Callable[[], object]) -> None:
        async def wait() -> None:
            while not condition():
                self.changed.clear()
                await self.changed.wait()

        await asyncio.wait_for(wait(), LIMIT_S)


def _size(found: KubernetesObject) -> int:
    return int(found.get("bytes", 0))


class Place:
    def __init__(self) -> None:
        self.now_s = 100.0
        self.news = 0
        self.server = Answers()
        self.cache = ObjectCache(self.server, lambda: self.now_s, self._tell, weigh=_size)

    def _tell(self) -> None:
        self.news += 1

    def size(self, of: Reference) -> object:
        found = self.cache.find(of)
        return None if found is None else found["size"]


@asynccontextmanager
async def place() -> AsyncIterator[Place]:
    there = Place()
    try:
        yield there
    finally:
        await there.cache.close()


def content(size: int, uid: str = "u") -> KubernetesObject:
    return {"metadata": {"uid": uid}, "size": size}


REFUSALS = [Forbidden("GET", "no", 403), NotFound("GET", "gone", 404), ServerUnreachable("GET", "503")]


async def test_an_object_is_read_again_periodically_and_returned_meanwhile() -> None:
    async with place() as there:
        assert there.cache.find(job()) is None
        await there.server.answer("jobs a", content(2))
        assert (there.size(job()), there.news) == (2, 1)
        there.now_s += FRESH_S - 1
        assert (there.size(job()), there.server.asked) == (2, ["jobs a"])
        there.now_s += 1
        assert there.size(job()) == 2, "the old object is used during the read"
        kept = there.cache.find(job())
        await there.server.answer("jobs a", content(2))
        assert there.cache.find(job()) is kept, "what was derived from it remains valid"
        assert there.news == 1, "nothing changed"
        there.now_s += FRESH_S
        there.size(job())
        await there.server.answer("jobs a", content(5))
        assert (there.size(job()), there.news) == (5, 2)


async def test_a_value_of_another_type_is_a_change() -> None:
    async with place() as there:
        for value in (True, 1):
            there.size(job())
            await there.server.answer("jobs a", {"metadata": {"uid": "u"}, "size": value})
            there.now_s += FRESH_S
        assert type(there.size(job())) is int


@pytest.mark.parametrize("error", REFUSALS)
async def test_no_failure_forgets_an_object(error: Exception) -> None:
    async with place() as there:
        there.size(job())
        await there.server.answer("jobs a", content(2))
        for _ in range(4):
            there.now_s += FRESH_S
            assert there.size(job()) == 2
            await there.server.answer("jobs a", error)
            assert there.size(job()) == 2
        there.now_s += FRESH_S
        there.size(job())
        await there.server.answer("jobs a", content(3, uid="of another object with this name"))
        assert there.size(job()) == 2


async def test_a_refusal_is_told_apart_from_an_object_that_is_still_being_read() -> None:
    async with place() as there:
        there.size(job())
        assert there.cache.refusal(job()) == ""
        await there.server.answer("jobs a", REFUSALS[0])
        assert "no" in there.cache.refusal(job())
        assert there.news == 1
        there.size(job())
        assert there.server.asked == ["jobs a"], "the read must not be repeated immediately"
        there.now_s += RETRY_S
        there.size(job())
        await there.server.answer("jobs a", content(1))
        assert (there.cache.refusal(job()), there.size(job())) == ("", 1)


async def test_a_kind_that_hangs_delays_no_other_and_gets_few_requests() -> None:
    async with place() as there:
        hung = [Reference("kubeflow.org/v1", "PyTorchJob", "team", f"p{k}", "u") for k in range(10)]
        for each in hung:
            there.size(each)
        there.size(job())
        await there.server.answer("jobs a", content(2))
        assert there.size(job()) == 2
        assert len(there.server.asked) == PER_KIND + 1
        for k in range(PER_KIND):
            await there.server.answer(f"pytorchjobs p{k}", REFUSALS[2])
        for each in hung:
            there.size(each)
        assert len(there.server.asked) == PER_KIND + 1, "reads of this kind must pause"
        there.now_s += RETRY_S
        for each in hung:
            there.size(each)
        await there.server.until(lambda: len(there.server.asked) == 2 * PER_KIND + 1)
        assert there.server.asked[-PER_KIND:] == [f"pytorchjobs p{k}" for k in range(4, 8)], (
            "each object must get its turn"
        )


async def test_an_object_that_nobody_looks_up_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_cache, "MAX_OBJECTS", 1)
    async with place() as there:
        there.size(job())
        await there.server.answer("jobs a", content(2))
        assert there.size(job("b")) is None
        assert there.server.asked == ["jobs a"], "there is no room"
        there.now_s += object_cache.UNUSED_S + 1
        there.cache.forget_unused()
        there.size(job("b"))
        await there.server.answer("jobs b", content(3))
        assert there.size(job("b")) == 3


def of_namespace(namespace: str, name: str) -> Reference:
    return Reference("batch/v1", "Job", namespace, name, "u")


async def test_one_namespace_leaves_room_for_the_objects_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_cache, "NAMESPACE_OBJECTS", 1)
    async with place() as there:
        there.cache.find(of_namespace("greedy", "a"))
        assert there.cache.find(of_namespace("greedy", "b")) is None
        assert "more than 1 owners" in there.cache.refusal(of_namespace("greedy", "b"))
        there.cache.find(of_namespace("modest", "c"))
        await there.server.answer("jobs a", content(1))
        await there.server.answer("jobs c", content(2))
        assert there.server.asked == ["jobs a", "jobs c"]
        there.now_s += object_cache.UNUSED_S + 1
        there.cache.forget_unused()
        there.cache.find(of_namespace("greedy", "b"))
        await there.server.answer("jobs b", content(3))
        assert there.cache.find(of_namespace("greedy", "b")) == content(3)


async def test_the_objects_of_one_namespace_have_a_limited_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_cache, "NAMESPACE_SIZE", 100)
    async with place() as there:
        for namespace, name in (("greedy", "a"), ("greedy", "b"), ("modest", "c")):
            there.cache.find(of_namespace(namespace, name))
            await there.server.answer(f"jobs {name}", {**content(1), "bytes": 60})
        assert there.cache.find(of_namespace("greedy", "a")) is not None
        assert there.cache.find(of_namespace("greedy", "b")) is None
        assert "take more than" in there.cache.refusal(of_namespace("greedy", "b"))
        assert there.cache.find(of_namespace("modest", "c")) is not None
        there.now_s += FRESH_S
        there.cache.find(of_namespace("greedy", "a"))
        await there.server.answer("jobs a", {**content(2), "bytes": 90})
        assert there.size(of_namespace("greedy", "a")) == 2, "its own earlier size does not count"
        there.now_s += object_cache.UNUSED_S + 1
        there.cache.forget_unused()
        there.cache.find(of_namespace("greedy", "b"))
        await there.server.answer("jobs b", {**content(3), "bytes": 60})
        assert there.size(of_namespace("greedy", "b")) == 3, "a forgotten object takes no room"

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast.snapshot.private_store import PrivateReader, PrivateStore
from tests.crash.killing import killed_at_every_line
from tests.samples.privates import put, state, steps_of


@pytest.mark.parametrize("size", [300, 3000])
def test_a_writer_killed_at_any_line_damages_no_other_step(memory: Path, size: int) -> None:
    template = memory / "template"
    template.mkdir()
    filled = PrivateStore(template / "rank", 0, capacity_bytes=512, every=5)
    for held in (range(8, 9), range(20, 21), range(37, 40)):
        put(filled, held)
    before = set(steps_of(PrivateReader(template / "rank")))

    def act(store: PrivateStore) -> None:
        store.put(1, 40, state(40, size))

    def check(work: Path, finished: bool) -> None:
        reader = PrivateReader(work / "rank")
        for step in before - {8, 20}:  # 40 takes the slots of 8 (ruler) and 20 (every)
            found = reader.get(step)
            assert found is not None
            assert found.data == state(step)
        for step, length in ((40, size), (8, 300), (20, 300)):
            found = reader.get(step)
            assert found.data == state(step, length) if found else step != 40 or not finished
        put(PrivateStore(work / "rank", 0, capacity_bytes=512, every=5), range(40, 50))
        assert {49, 48, 47, 46, 45, 44, 40} <= set(steps_of(reader))

    def opened(work: Path) -> PrivateStore:
        return PrivateStore(work / "rank", 0, capacity_bytes=512, every=5)

    assert killed_at_every_line(template, opened, act, check) >= 4


def test_a_concurrent_reader_never_sees_a_mixed_state(memory: Path) -> None:
    path = memory / "rank-0"
    put(PrivateStore(path, 0, capacity_bytes=512), range(8))
    last = 4000
    writer = os.fork()
    if writer == 0:
        store = PrivateStore(path, 0, capacity_bytes=512)
        for step in range(8, last + 1):
            store.put(1, step, step.to_bytes(8, "little") * (5 + step // 64))  # the states grow
        os._exit(0)
    reader = PrivateReader(path)
    seen = 0
    while os.waitpid(writer, os.WNOHANG)[0] == 0:
        for held in reader.held()[:4]:
            found = reader.get(held.step)
            assert found is None or held.step < 8 or set(chunks(found.data)) == {held.step}
            seen += found is not None
    assert steps_of(reader)[:3] == [last, last - 1, last - 2]
    assert seen


def chunks(data: bytes) -> list[int]:
    return [int.from_bytes(data[at : at + 8], "little") for at in range(0, len(data), 8)]


def test_a_store_killed_at_any_line_of_its_creation_can_be_opened(memory: Path) -> None:
    template = memory / "template"
    template.mkdir()

    def check(work: Path, finished: bool) -> None:
        assert PrivateReader(work / "rank").held() == ()
        put(PrivateStore(work / "rank", 0, capacity_bytes=512), range(3))
        assert [path.name for path in work.iterdir()] == ["rank"]

    def act(work: Path) -> None:
        PrivateStore(work / "rank", 0, capacity_bytes=512)

    assert killed_at_every_line(template, lambda work: work, act, check) >= 3

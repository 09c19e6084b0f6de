"""The memory for reports is limited in total, and a namespace takes it only from itself."""

from __future__ import annotations

import gc
import tracemalloc
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.protocol import codec
from holdfast.protocol.launcher_messages import StartTimes
from holdfast.protocol.member_messages import MemberReport
from supervisor.controller.limits.incoming import NAMESPACE_PLACES, PLACES
from supervisor.controller.limits.report_memory import (
    NAMESPACE_BYTES,
    TOTAL_BYTES,
    MemoryHolder,
    ReportMemory,
    member_bytes,
)
from supervisor.controller.member_server import MemberServer, largest_report
from supervisor.controller.reports.report_decoder import ReportDecoder
from tests.unit.supervisor.controller.limits.largest_reports import (
    HOSTILE,
    NS,
    STEP,
    held_by,
    hostile,
    largest_honest,
    shortened,
    text_of,
)
from tests.unit.supervisor.job_views import launcher, progress, rank, report

ROOT = Path(__file__).parents[5]


def never() -> None:
    pytest.fail("a member had to give up its memory")


@pytest.mark.parametrize("nproc", [1, 8, 64, codec.MAX_RANKS])
def test_the_largest_report_of_every_kind_passes_each_limit(nproc: int) -> None:
    for kind, largest in largest_honest(nproc).items():
        text, decoder, memory = text_of(largest), ReportDecoder(), ReportMemory()
        assert len(text) <= largest_report(nproc), kind
        assert decoder.decode(text) == largest, kind
        size = member_bytes(decoder.retained_bytes)
        for _ in range(16):
            assert memory.reserve(MemoryHolder("one", never), size) == "", kind


@pytest.mark.parametrize("count", [64, 512])
@pytest.mark.parametrize("kind", HOSTILE)
def test_what_is_reserved_covers_what_a_report_takes(kind: str, count: int) -> None:
    text = shortened(text_of(hostile(kind, count)))
    assert codec.decode(MemberReport, text) == hostile(kind, count), "only what has its default is left out"
    taken, counted = _taken(text)
    assert taken <= counted
    assert counted < 25 * len(text)


@pytest.mark.parametrize("kind", sorted(largest_honest(1)))
def test_what_is_reserved_covers_the_largest_honest_reports(kind: str) -> None:
    text = text_of(largest_honest(64)[kind])
    taken, counted = _taken(text)
    assert taken <= counted < 3 * taken


def _taken(text: str) -> tuple[int, int]:
    """Return how much memory a server keeps of a member whose report is `text`, and how much is counted."""
    made = MemberServer(lambda: 10**9, lambda: None, "another clock")
    line, decoder = made.connection("m"), ReportDecoder()
    ReportDecoder().decode(text)  # what the decoder keeps for all reports is not counted
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        made._accept(line, decoder.decode(text))
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - before, decoder.retained_bytes
    finally:
        tracemalloc.stop()


def test_a_namespace_cannot_take_more_than_its_limit_and_the_reason_names_it() -> None:
    memory, mine = ReportMemory(1000, 600), [MemoryHolder("mine", never) for _ in range(4)]
    assert [memory.reserve(each, 200) for each in mine[:3]] == ["", "", ""]
    why = memory.reserve(mine[3], 200)
    assert "namespace mine" in why
    assert memory.reserve(MemoryHolder("another", never), 400) == ""
    assert memory.reserve(mine[0], 100) == "", "a smaller report is always possible"
    assert memory.reserve(mine[3], 100) == ""


def test_the_namespace_with_more_than_its_part_gives_way() -> None:
    gone: list[str] = []
    memory = ReportMemory(1000, 900)
    for name, size in (("large", 400), ("middle", 300), ("small", 200)):
        assert memory.reserve(MemoryHolder("greedy", partial(gone.append, name)), size) == ""
    others = [MemoryHolder("modest", never) for _ in range(4)]
    assert [memory.reserve(each, 100) for each in others] == [""] * 4
    assert gone == ["large"]
    assert memory.reserved_bytes == 900


def test_a_refused_member_keeps_what_it_had() -> None:
    memory = ReportMemory(1000, 900)
    assert memory.reserve(MemoryHolder("modest", never), 300) == ""
    greedy = MemoryHolder("greedy", never)
    assert memory.reserve(greedy, 600) == ""
    assert memory.reserve(greedy, 800) != ""
    assert (greedy.reserved_bytes, memory.reserved_bytes) == (600, 900)
    memory.release(greedy)
    memory.release(greedy)
    assert memory.reserved_bytes == 300


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(1, 120)), max_size=60))
@settings(max_examples=200)
def test_the_total_is_never_exceeded_and_no_namespace_within_its_equal_half_gives_way(
    requests: list[tuple[int, int, int]],
) -> None:
    memory = ReportMemory(400, 300)
    held: dict[tuple[int, int], int] = {}
    holders: dict[tuple[int, int], MemoryHolder] = {}

    def release_all(who: tuple[int, int]) -> None:
        names = {name for (name, _), size in held.items() if size}
        mine = sum(size for (name, _), size in held.items() if name == who[0])
        assert mine > 400 / 2 / len(names | {now[0]})
        held[who] = 0

    for namespace, member, size in requests:
        now = who = (namespace, member)
        holder = holders.setdefault(who, MemoryHolder(str(namespace), partial(release_all, who)))
        if not memory.reserve(holder, size):
            held[who] = size
        assert memory.reserved_bytes == sum(held.values()) <= 400
        assert all(each.reserved_bytes == held.get(key, 0) for key, each in holders.items())


def test_two_thousand_members_of_eight_ranks_are_within_the_limits_of_one_namespace() -> None:
    """They train again after a fault, since which each member lists the private states of its ranks."""
    state = launcher(*(replace(rank(n), local_rank=n, marks=StartTimes(NS, NS, NS, NS)) for n in range(8)))
    steps = tuple(replace(progress(n, STEP), loss="1.234567890123", step_s=0.345621) for n in range(8))
    usual = report("gpt-large-worker-0.00000000", state, progress=steps, privates=held_by(8))
    decoder = ReportDecoder()
    decoder.decode(text_of(usual))
    assert 2_000 * member_bytes(decoder.retained_bytes) < NAMESPACE_BYTES


def test_all_limits_together_are_within_the_memory_limit_of_the_manifest() -> None:
    documents = yaml.safe_load_all((ROOT / "manifests/base/supervisor.yaml").read_text())
    [deployment] = [each for each in documents if each and each["kind"] == "Deployment"]
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["memory"] == "1Gi"
    incoming = PLACES * (codec.MAX_MESSAGE_BYTES + (256 << 10))
    decoding = 16 * codec.MAX_MESSAGE_BYTES  # of one report: its text, and the JSON values
    process = 256 << 20  # the libraries, the pods and owners, and 250 jobs
    assert TOTAL_BYTES + incoming + decoding + process < 1 << 30
    assert NAMESPACE_PLACES * 8 <= PLACES

"""Texts of any number of ranks fit in one message."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.inspection import rank_inspector
from holdfast.launcher.workers.warm_pool import MemberSettings
from holdfast.launcher.workers.worker_group import WorkerGroup
from holdfast.launcher.workers.worker_process import Worker, WorkerProcess
from holdfast.protocol import codec, foreign_text
from holdfast.protocol.foreign_text import sent_bytes, shortened
from holdfast.protocol.launcher_messages import (
    BadNumber,
    Ending,
    Launch,
    LauncherState,
    RankInspection,
    RankStart,
    SecureAnswer,
)
from holdfast.protocol.member_messages import (
    PROTOCOL,
    HeldPrivateState,
    MemberReport,
    RankProgress,
    RankStall,
)
from holdfast.protocol.rank_channel import WorkerMessage

TEXTS = ("x", "│", "错", "\U0001f642", "\x1b", '"', "\ud800", "ы\n")


@given(
    text=st.one_of(st.text(max_size=300), st.sampled_from(TEXTS).map(lambda text: text * 700)),
    most_bytes=st.integers(0, 2000),
    head=st.floats(0, 1),
)
def test_a_text_is_cut_to_its_limit_and_a_shorter_one_is_whole(
    text: str, most_bytes: int, head: float
) -> None:
    found = shortened(text, most_bytes, head)
    assert sent_bytes(found) <= most_bytes
    assert (found == text) is (sent_bytes(text) <= most_bytes)
    if found != text and found:
        assert "[..." in found


def test_the_middle_is_omitted_and_the_text_says_so() -> None:
    text = "Traceback\n" + "  a frame\n" * 1000 + "ValueError: no"
    found = shortened(text, 500)
    assert found.startswith("Traceback\n  a frame\n")
    assert found.endswith("  a frame\nValueError: no")
    assert f"\n[... the middle of {len(text):,} characters is omitted ...]\n" in found
    assert sent_bytes(found) > 480, "more was cut than necessary"


def group_of(nproc: int, world_size: int, folder: Path) -> WorkerGroup:
    group = WorkerGroup(MemberSettings(folder, folder, "m0", nproc, folder, 0))
    group.launch = Launch(1, world_size, nproc, "127.0.0.1", 4000, -1, 0.01)
    group.workers = tuple(
        Worker(n, n, RankStart(n, n), WorkerProcess(n, None, folder, pid=1000 + n))  # type: ignore[arg-type]
        for n in range(nproc)
    )
    return group


def raised(text: str, failed_ns: int, fail: str = "exception") -> Ending:
    return Ending(failed_ns, 1, None, False, fail, failed_ns, text, raised=text[:200])


def report_of(state: LauncherState) -> MemberReport:
    """Return the largest report that a member may have to send with this state."""
    many, ranks = (1 << 40), range(len(state.ranks))
    return MemberReport(
        PROTOCOL, "m0", "node", many, many, many, len(ranks), replace(state, looks=()), "http://10.0.0.1:40000",
        progress=tuple(
            RankProgress(n, many, "in a step", "a label of a pause", "-1.234567890e-05", "1.23456789", many,
                         many, 1.23456789e15, *(0.123456, 0.123456), many, *(0.123456,) * 3, many, 0.123456,
                         many)
            for n in ranks
        ),
        stalls=tuple(RankStall(n, many, many, 9, many, "in a step", 123.456, 123.456) for n in ranks),
        looks=state.looks,
        privates=tuple(HeldPrivateState(n, many, many, False) for n in ranks for _ in range(30)),
    )  # fmt: skip


def look(rank: int, text: str) -> RankInspection:
    return RankInspection(
        rank, 1 << 40, 9, 1 << 40, "S", 0.1234, text, calls=(text[:9],) * 8, at=text, where=text, stirs=text
    )


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("nproc", [1, 7, 64, codec.MAX_RANKS])
def test_the_texts_of_any_number_of_ranks_are_accepted_by_sidecar_and_supervisor(
    nproc: int, text: str, tmp_path: Path
) -> None:
    """With 14 ranks and whole tracebacks, a member's reports were once too long, and it counted as lost."""
    long = text * 16_000
    group = group_of(nproc, nproc, tmp_path)
    for n, worker in enumerate(group.workers):
        said = WorkerMessage(
            "failing", 1000 + n, ending=raised(long, 1 + n), flag=BadNumber("nan", 3, long, 1, 1, long),
            secured=SecureAnswer(n, 4, False, long), note=long, where=long,
        )  # fmt: skip
        assert worker.process is not None
        for what in ("failing", "flag", "secured", "note", "where"):
            group.receive(worker.process, replace(said, what=what))
    looks = rank_inspector.bounded(tuple(look(n, long[:8000]) for n in range(nproc)))
    state = replace(group.state(), looks=looks, warm_ending=Ending(1, message=long[:16_000]))
    line = codec.encode(state)
    assert codec.decode(LauncherState, line) == state
    report = report_of(state)
    assert codec.decode(MemberReport, codec.encode(report)) == report
    assert [each.ending.code for each in state.ranks if each.ending is not None] == [1] * nproc
    assert all(each.ending is not None and each.ending.fail == "exception" for each in state.ranks)
    assert all(each.ending is not None and each.ending.message and each.ending.raised for each in state.ranks)


@settings(max_examples=30, deadline=None)
@given(texts=st.lists(st.text(max_size=4000), min_size=1, max_size=80), world_size=st.integers(1, 5000))
def test_the_texts_of_a_worker_group_have_a_bounded_total_length(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], world_size: int
) -> None:
    group = group_of(len(texts), max(world_size, len(texts)), tmp_path_factory.getbasetemp())
    for worker, text in zip(group.workers, texts, strict=True):
        assert worker.process is not None
        group.receive(
            worker.process, WorkerMessage("failing", worker.process.pid, ending=raised(text, 1 + worker.rank))
        )
    told = [worker.ending for worker in group.workers if worker.ending is not None]
    assert len(told) == len(texts)
    assert told[0].message == texts[0], "the first text must be complete"
    most = max(foreign_text.LEAST_BYTES, foreign_text.ENDINGS_BYTES // max(world_size, len(texts)))
    assert all(sent_bytes(each.message) + sent_bytes(each.raised) <= most for each in told[1:])


def test_the_text_of_the_first_cause_is_kept_whole(tmp_path: Path) -> None:
    group = group_of(4, 512, tmp_path)
    long = "x" * 20_000
    for local_rank, failed_ns, fail in ((1, 5, "distributed"), (3, 9, "exception"), (0, 7, "exception")):
        process = group.workers[local_rank].process
        assert process is not None
        group.receive(process, WorkerMessage("failing", process.pid, ending=raised(long, failed_ns, fail)))
    whole = [
        worker.rank for worker in group.workers if worker.ending is not None and worker.ending.message == long
    ]
    assert whole == [0]


def test_the_texts_of_a_small_group_are_whole(tmp_path: Path) -> None:
    group = group_of(8, 8, tmp_path)
    for worker in group.workers:
        assert worker.process is not None
        group.receive(
            worker.process,
            WorkerMessage("failing", worker.process.pid, ending=raised("x" * 16_000, 1 + worker.rank)),
        )
    assert [worker.ending.message for worker in group.workers if worker.ending] == ["x" * 16_000] * 8


def test_in_a_large_group_of_small_members_the_end_of_each_log_is_whole(tmp_path: Path) -> None:
    """The end of the log distinguishes a rank that its library aborted from the rank that caused this."""
    group = group_of(8, 4096, tmp_path)
    log = "ProcessGroupNCCL says a word\n" * 141
    for worker in group.workers:
        assert worker.process is not None
        ended = Ending(1 + worker.rank, None, 6, message=log)
        group.receive(worker.process, WorkerMessage("failing", worker.process.pid, ending=ended))
    assert [worker.ending.message for worker in group.workers if worker.ending] == [log] * 8

"""The largest reports that honest members send, and the reports that take the most memory for their size."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from holdfast.protocol import codec, foreign_text, lineage, progress
from holdfast.protocol import member_messages as messages
from holdfast.protocol.launcher_messages import (
    MAX_CALLS,
    MAX_CHANGED,
    BadNumber,
    Ending,
    LauncherState,
    RankInspection,
    RankState,
    SecureAnswer,
    StartTimes,
)
from holdfast.protocol.lineage import Lineage
from holdfast.protocol.member_messages import (
    CheckpointReport,
    HeldChecksum,
    HeldPrivateState,
    HeldSnapshot,
    KnownHistory,
    ListedCheckpoint,
    MemberReport,
    MemoryUse,
    RankProgress,
    RankStall,
    RefusedCheckpoint,
    StorageListing,
    UncommittedWork,
)
from sidecar.state.holdings import NEWEST

NS = 9_123_456_789_012_345
STEP = 8_123_456
SECONDS = 12345.678901
GENERATION, BYTES = 4_321, 987_654_321_012
# of each rank: the newest ones, those for the steps of two snapshots, and those that it has started from
PRIVATES = NEWEST + 2 + 3


def text(most_bytes: int) -> str:
    return "x" * most_bytes


def _ending(message: str, raised: str) -> Ending:
    return Ending(NS, 139, 11, True, "distributed", NS, message, True, True, STEP, raised, STEP, True)


def _launcher(nproc: int) -> LauncherState:
    words = text(foreign_text.share(foreign_text.WORDS_BYTES, nproc) // 3)
    message = text(min(foreign_text.WHOLE_BYTES, foreign_text.share(foreign_text.ENDINGS_BYTES, nproc) // 2))
    flag = BadNumber("jump", STEP, "12345.67890123", STEP, NS, words)
    marks = StartTimes(NS, NS, NS, NS, STEP)
    ranks = tuple(
        RankState(
            rank,
            rank,
            4_000_000,
            GENERATION,
            "running",
            _ending(message, message[: len(message) // 4]),
            flag,
            marks,
            words,
            words,
            True,
            words,
        )
        for rank in range(nproc)
    )
    secured = tuple(SecureAnswer(rank, STEP, False, words) for rank in range(nproc))
    changed = (text(500),) * MAX_CHANGED
    warm = _ending(text(foreign_text.WHOLE_BYTES), text(foreign_text.WHOLE_BYTES // 4))
    return LauncherState(
        4_000_000,
        GENERATION,
        ranks,
        tuple(range(nproc)),
        65_535,
        GENERATION,
        secured,
        99,
        warm,
        99,
        looked=STEP,
        epoch=GENERATION,
        changed=changed,
    )


def _progress(rank: int) -> RankProgress:
    values: dict[str, Any] = {each.name: SECONDS for each in fields(RankProgress) if each.name.endswith("_s")}
    late = tuple(STEP + n for n in range(progress.MAX_VOID))
    amended = tuple(STEP + n for n in range(progress.MAX_AMENDED))
    return RankProgress(
        rank,
        STEP,
        "checkpoint",
        text(progress.LABEL_BYTES),
        "1.2345678901234567e+123",
        "1.2345678901234567e+123",
        NS,
        NS,
        1.2345678901234567e123,
        snapshot_step=STEP,
        own_steps=99,
        state_bytes=BYTES,
        late=late,
        amended=amended,
        early=UncommittedWork(SECONDS, SECONDS, True, SECONDS),
        tail_declared=True,
        **values,
    )


def _inspection(rank: int, nproc: int) -> RankInspection:
    most = foreign_text.share(foreign_text.INSPECTIONS_BYTES, nproc)
    calls = tuple(f"futex {n:04}" for n in range(MAX_CALLS))
    return RankInspection(
        rank,
        STEP,
        3,
        NS,
        "S",
        SECONDS,
        text(most // 2),
        calls=calls,
        at=text(most // 8),
        where=text(most // 8),
    )


def held_by(nproc: int) -> tuple[HeldPrivateState, ...]:
    """Return as many private states as a member with `nproc` ranks lists."""
    return tuple(
        HeldPrivateState(rank, GENERATION, STEP + n, True) for n in range(PRIVATES) for rank in range(nproc)
    )


def largest_honest(nproc: int) -> dict[str, MemberReport]:
    """Return the largest reports of a member with `nproc` ranks, by the situation."""
    ranks = range(nproc)
    history = tuple(Lineage(GENERATION + n, STEP + n) for n in range(lineage.MOST))
    skip = tuple(STEP + n for n in range(messages.MAX_SKIPPED))
    usual = MemberReport(
        protocol=messages.PROTOCOL,
        member=text(120),
        node=text(63),
        sidecar_pid=4_000_000,
        sequence=NS,
        now_ns=NS,
        nproc=nproc,
        launcher=replace(_launcher(nproc), ranks=()),
        peer_url=text(60),
        progress=tuple(map(_progress, ranks)),
        slots=(HeldSnapshot(GENERATION, STEP, BYTES),) * 2,
        seals=(HeldChecksum(GENERATION, STEP, BYTES, 4_000_000_000),) * messages.MAX_SEALS,
        room=MemoryUse(text(60), BYTES, BYTES, BYTES, BYTES, BYTES, BYTES),
        told=KnownHistory(GENERATION, history),
    )
    unusable = tuple(HeldSnapshot(GENERATION, STEP + n, BYTES) for n in range(messages.MAX_UNUSABLE))
    error = text(foreign_text.WHOLE_BYTES)
    failed = replace(
        usual, launcher=_launcher(nproc), privates=held_by(nproc), prepare_error=error, secured_for=GENERATION
    )
    stalls = tuple(RankStall(rank, GENERATION, STEP, 3, NS, "backward", SECONDS, SECONDS) for rank in ranks)
    listing = StorageListing(
        checkpoints=(ListedCheckpoint(text(16), STEP, GENERATION, 32_768, 2e9),) * messages.MAX_LISTED,
        refused=(RefusedCheckpoint(text(16), STEP, text(300)),) * messages.MAX_LISTED,
        lineage=history,
        error=text(300),
    )
    return {
        "training": usual,
        "late": replace(usual, stalls=stalls, looks=tuple(_inspection(rank, nproc) for rank in ranks)),
        "failed": failed,
        "storage": replace(usual, storage=listing, durable=CheckpointReport(error=text(4_000))),
        "skipped": replace(usual, told=KnownHistory(GENERATION, history, skip), unusable=unusable),
    }


def hostile(kind: str, count: int) -> MemberReport:
    """Return a report that repeats what takes much memory for its size, within the limits of the lists."""
    base = MemberReport(messages.PROTOCOL, "m", "", 0, 0, 0, 1, None, "")
    least = RankProgress(0, 0, "", "", "", "", 0, 0, 0.0, 0.0, 0.0, 0)
    numbers = tuple(300 + n for n in range(progress.MAX_VOID))
    words = tuple(f"{n:02x}" for n in range(MAX_CALLS))
    looked = RankInspection(0, 0, 0, 0, "", 0.0, "", calls=words)
    found: dict[str, dict[str, Any]] = {
        "steps": {"progress": tuple(replace(least, rank=n, late=numbers) for n in range(count))},
        "waits": {"looks": tuple(replace(looked, rank=n) for n in range(count))},
        "objects": {"privates": tuple(HeldPrivateState(n, n, n, True) for n in range(count * 30))},
        "wide texts": {"notes": ("x" * count * 100 + "\U0001f600",) * messages.MAX_NOTES},
        "texts": {"notes": ("x" * count * 100,) * messages.MAX_NOTES},
        "ranks": {
            "launcher": LauncherState(
                0, 0, tuple(RankState(n, n, n, 1, "exited", Ending(300 + n)) for n in range(count)), (), 0
            )
        },
    }
    return replace(base, **found[kind])


HOSTILE = ("steps", "waits", "objects", "wide texts", "texts", "ranks")


def text_of(report: MemberReport) -> str:
    return codec.encode(report).decode()


def shortened(text_: str) -> str:
    """Return the text of a report without the fields that have their default, as a peer may send it."""
    for default in (
        '"ending":null,',
        '"own_s":0.0,"own_least_s":0.0,"own_data_s":0.0,"own_steps":0,"snapshot_s":0.0,"state_bytes":0,'
        '"tail_s":0.0,"tail_usual_s":0.0,"pause_left_s":0.0,',
        '"number":0,"window_s":0.0,"traced":false,"moved":false,"io_bytes":0,',
        ',"children":0,"children_cpu_s":0.0,"at":"","where":"","asked":0,"rests_s":0.0,"stirs":"","mark":0,'
        '"ends":0,"meets_unseen":true',
        '"code":null,"signal":null,"ours":false,"fail":"","failed_ns":0,"message":"","unwinding":false,'
        '"overdue":false,"step":-1,"raised":"","paused":-1,"doubtful":false',
        '"started_ns":0,"joined_ns":0,"restored_ns":0,"first_step_ns":0,"goal":0',
    ):
        text_ = text_.replace("," + default + "}", "}").replace(default, "")
    return text_.replace(",}", "}")

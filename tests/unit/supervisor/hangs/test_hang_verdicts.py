"""Each criterion for the hung rank has exactly this verdict, sentence and limit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast.protocol.launcher_messages import RankInspection
from supervisor.hangs import hung_rank
from supervisor.hangs.hung_rank import HangVerdict, StackGroup, group_stacks
from tests.unit.supervisor.hangs.test_hung_rank import (
    CALL,
    HOOK,
    IN_BARRIER,
    IN_LOADER,
    SLEEPS,
    at,
    dump,
    named,
    waiting,
)


def one(why: str, number: int = 1) -> HangVerdict:
    return HangVerdict(number, f"rank {number} {why}", (number,))


NO_STACK = replace(waiting(1), stack="no such process")
ITEM = ("train_step (train.py:40)", "<module> (train.py:50)")
OTHER = ("augment (data.py:7)", "<module> (train.py:45)")
ELSEWHERE = "is not waiting in a collective, unlike the others"


def cpu(number: int, seconds: float) -> RankInspection:
    return replace(waiting(number), cpu_s=seconds)


def inspections(*inspected: RankInspection) -> tuple[RankInspection, ...]:
    return inspected


@pytest.mark.parametrize(
    ("inspected", "expected"),
    [
        (inspections(SLEEPS), one("is the only candidate")),
        (inspections(waiting(0), replace(waiting(1), process_state="Z")), one("is dead")),
        (inspections(waiting(0), replace(waiting(1), process_state="X (dead)")), one("is dead")),
        (
            inspections(waiting(0), replace(waiting(1), process_state="T (stopped)")),
            one("is stopped (state T)"),
        ),
        (
            inspections(waiting(0), *(replace(waiting(n), process_state="T") for n in (1, 2, 3))),
            HangVerdict(1, "rank 1 is stopped (state T), like ranks 2, 3", (1, 2, 3)),
        ),
        (
            inspections(waiting(0), *(replace(waiting(n), process_state="Z") for n in (1, 2))),
            HangVerdict(1, "rank 1 is dead, like rank 2", (1, 2)),
        ),
        (
            inspections(waiting(0), replace(waiting(1), step=8), replace(waiting(2), step=9)),
            one("is furthest behind: step 8 against 10"),
        ),
        (
            inspections(waiting(0), replace(waiting(1), phase_seq=1), replace(waiting(2), phase_seq=4)),
            one("is furthest behind within step 10: phase change 1 against 4"),
        ),
        (
            inspections(waiting(0), replace(waiting(1), phase=3)),
            one("is furthest behind within step 10: phase change 2 against 2"),
        ),
        (inspections(waiting(0), HOOK), one(f"{ELSEWHERE}, but is in F.backward (train.py)")),
        (
            inspections(waiting(0), at(1, *IN_LOADER)),
            one(f"{ELSEWHERE}, but is in _PollLikeSelector.select (selectors.py)"),
        ),
        (
            inspections(waiting(0), NO_STACK),
            one("has no readable stack while the others wait in a collective"),
        ),
        (
            inspections(at(0, *ITEM), at(1, *OTHER), at(2, *ITEM)),
            one("has a different stack from the others"),
        ),
        (inspections(cpu(0, 0.0124), cpu(1, 0.05)), one("spins (0.05 s of CPU time) while the others sleep")),
        (
            inspections(cpu(0, 0.05), cpu(1, 0.2), cpu(2, 0.01)),
            one("spins (0.20 s of CPU time) while the others sleep"),
        ),
        (
            inspections(cpu(0, 0.05), cpu(1, 0.0124), cpu(2, 0.06)),
            one("sleeps (0.01 s of CPU time) while the others spin"),
        ),
        (
            inspections(waiting(0), replace(waiting(1), process_state="D (disk)"), waiting(2)),
            one("is blocked in the kernel (state D)"),
        ),
        (
            inspections(waiting(0), waiting(2)),
            HangVerdict(0, "the evidence does not distinguish ranks 0, 2; rank 0 is the lowest", (0, 2)),
        ),
        (
            inspections(at(0, *ITEM), at(1, *OTHER), at(2, *IN_BARRIER)),
            HangVerdict(0, "the evidence does not distinguish ranks 0, 1; rank 0 is the lowest", (0, 1)),
        ),
        (
            inspections(waiting(3), *(replace(waiting(n), process_state="D") for n in (1, 2))),
            HangVerdict(1, "the evidence does not distinguish ranks 1, 2; rank 1 is the lowest", (1, 2)),
        ),
    ],
)
def test_each_criterion_names_the_expected_rank(
    inspected: tuple[RankInspection, ...], expected: HangVerdict
) -> None:
    assert named(*inspected) == expected


@pytest.mark.parametrize(
    "seconds",
    [(0.0125, 0.049), (0.0126, 0.05), (0.01, 0.049, 0.05), (0.0126, 0.05, 0.06), (0.01, 0.05)],
)
def test_cpu_times_that_are_too_small_or_too_similar_do_not_single_out_a_sleeping_rank(
    seconds: tuple[float, ...],
) -> None:
    found = named(*(cpu(number, each) for number, each in enumerate(seconds)))
    assert "sleeps" not in found.why
    spins = "spins" in found.why
    assert spins is (seconds == (0.01, 0.05))


def test_two_groups_of_equal_size_have_no_odd_stack() -> None:
    assert len(named(at(0, *ITEM), at(1, *OTHER)).outliers) == 2
    three = (at(0, *ITEM), at(1, *ITEM), at(2, *OTHER), at(3, *OTHER), at(4, *CALL[:1], *ITEM))
    assert named(*three) == one("has a different stack from the others", 4)


@pytest.mark.parametrize(
    ("frames", "wait"),
    [
        ((), hung_rank.UNKNOWN),
        (("f (train.py:1)",), hung_rank.NOT_WAITING),
        (("_engine_run_backward (torch/autograd/graph.py:1)",), hung_rank.BACKWARD),
        (("Engine._engine_run_backward (x.py:1)",), hung_rank.BACKWARD),
        (("_engine_run_backward_hook (x.py:1)",), hung_rank.NOT_WAITING),
        (("all_reduce (torch/distributed/distributed_c10d.py:1)",), hung_rank.COLLECTIVE),
        (("forward (torch/nn/parallel/distributed.py:1)",), hung_rank.COLLECTIVE),
        (("send (holdfast/training/protection/private_exchange.py:1)",), hung_rank.COLLECTIVE),
        (("wait (holdfast/state/device.py:1)",), hung_rank.COLLECTIVE),
        (("Stream.synchronize (torch/cuda/streams.py:1)",), hung_rank.COLLECTIVE),
        (("synchronize_all (torch/cuda/streams.py:1)",), hung_rank.NOT_WAITING),
        (("synchronize (mine.py:1)",), hung_rank.NOT_WAITING),
        (("f (train.py:1)", "all_reduce (torch/distributed/distributed_c10d.py:1)"), hung_rank.NOT_WAITING),
        (("gloo::wait (libtorch.so)", "f (train.py:1)"), hung_rank.COLLECTIVE),
        (("ncclRecv (libnccl.so)", "f (train.py:1)"), hung_rank.COLLECTIVE),
        (("c10d::Work::wait (x.so)", "f (train.py:1)"), hung_rank.COLLECTIVE),
        (("ProcessGroupMPI::wait (x.so)", "f (train.py:1)"), hung_rank.COLLECTIVE),
        (("futex_wait (libc.so)", "f (train.py:1)"), hung_rank.NOT_WAITING),
        (("futex_wait (libc.so)", "all_reduce (torch/distributed/x.py:1)"), hung_rank.COLLECTIVE),
        (("futex_wait (libc.so)",), hung_rank.NOT_WAITING),
        (("gloo::wait (libtorch.so)",), hung_rank.COLLECTIVE),
        (("<module> (<stdin>:1)", "all_reduce (torch/distributed/x.py:1)"), hung_rank.NOT_WAITING),
    ],
)
def test_the_innermost_python_frame_shows_whether_a_rank_waits(frames: tuple[str, ...], wait: int) -> None:
    assert hung_rank.classify_wait(dump(1, *frames)) == wait


def test_the_main_thread_decides_or_the_first_one_if_none_has_that_name() -> None:
    waits = "    all_reduce (torch/distributed/x.py:1)\n"
    works = "    f (train.py:1)\n"
    feeder, main = 'Thread 7 (idle): "Feeder"\n', 'Thread 8 (idle): "MainThread"\n'
    assert hung_rank.classify_wait(feeder + works + main + waits) == hung_rank.COLLECTIVE
    assert hung_rank.classify_wait(main + works + feeder + waits) == hung_rank.NOT_WAITING
    assert hung_rank.classify_wait(feeder + waits + feeder + works) == hung_rank.COLLECTIVE
    assert hung_rank.classify_wait("Thread 0x7f (most recent call first):\n" + waits) == hung_rank.COLLECTIVE
    assert hung_rank.classify_wait(waits) == hung_rank.UNKNOWN, "no thread"
    assert hung_rank.classify_wait(main + feeder + waits) == hung_rank.COLLECTIVE, "a thread without frames"


@pytest.mark.parametrize(
    ("place", "meets"),
    [
        ("_engine_run_backward (torch/autograd/graph.py:1)", True),
        ("all_reduce (torch/distributed/distributed_c10d.py:1)", True),
        ("all_reduce (torch/distributed/distributed_c10d.py", True),
        ("send (holdfast/training/protection/private_exchange.py:1)", True),
        ("synchronize (torch/cuda/streams.py:1)", False),
        ("wait (holdfast/state/device.py:1)", False),
        ("torch/distributed/ (train.py:1)", False),
        ("", False),
    ],
)
def test_a_collective_is_recognized_as_a_meeting_point(place: str, meets: bool) -> None:
    assert hung_rank.is_meeting_point(place) is meets


def test_equal_stacks_form_one_group() -> None:
    def thread(name: str, line: int, state: str = "idle") -> str:
        return f'Thread 0x{line:x} ({state}): "{name}"\n    f (a.py:{line})\n    g (b.py:2)\n'

    inspections = (
        replace(at(2), stack=thread("MainThread", 5) + thread("worker-12", 7)),
        replace(at(0), stack="header\n" + thread("worker-3", 9) + thread("MainThread", 6, "active")),
        replace(at(1), stack="  no stack \n"),
        replace(at(3), stack=thread("MainThread", 5)),
    )
    assert group_stacks(inspections) == (
        StackGroup((1,), "no stack"),
        StackGroup((3,), 'Thread "MainThread"\n    f (a.py:5)\n    g (b.py:2)'),
        StackGroup(
            (0, 2),
            'Thread "MainThread"\n    f (a.py:6)\n    g (b.py:2)\n'
            'Thread "worker-3"\n    f (a.py:9)\n    g (b.py:2)',
        ),
    )
    assert group_stacks(()) == ()
    numbered = (
        replace(at(0), stack=dump(1, "h_0x7f3 (a.py:1)")),
        replace(at(1), stack=dump(2, "h_12 (a.py:9)")),
    )
    assert [each.ranks for each in group_stacks(numbered)] == [(0, 1)]
    files = (replace(at(0), stack=dump(1, "h (a.py:1)")), replace(at(1), stack=dump(2, "h (b.py:1)")))
    assert [each.ranks for each in group_stacks(files)] == [(0,), (1,)]

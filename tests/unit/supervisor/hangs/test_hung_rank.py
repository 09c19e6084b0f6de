"""The dumps come from py-spy, of a DDP job over gloo; only names of the machine were changed."""

from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.protocol.launcher_messages import RankInspection
from supervisor.hangs.hung_rank import HangVerdict, find_hung_rank, group_stacks

DATA, FORWARD, BACKWARD = 2, 3, 4


def dump(pid: int, *frames: str, status: str = "idle", more: str = "") -> str:
    stack = "".join(f"    {frame}\n" for frame in frames)
    return (
        f"Process {pid}: python train.py\nPython v3.11.7 (/usr/bin/python3.11)\n\n"
        f'Thread {pid} ({status}): "MainThread"\n{stack}{more}'
    )


FEEDER = (
    'Thread {tid} (idle): "QueueFeederThread"\n'
    "    Condition.wait (threading.py:327)\n"
    "    Queue._feed (multiprocessing/queues.py:231)\n"
    "    Thread.run (threading.py:982)\n"
)
CALL = (
    "Module._call_impl (torch/nn/modules/module.py:1789)",
    "DistributedDataParallel._run_ddp_forward (torch/nn/parallel/distributed.py:1715)",
    "DistributedDataParallel.forward (torch/nn/parallel/distributed.py:1890)",
    "Module._call_impl (torch/nn/modules/module.py:1789)",
    "<module> (train.py:33)",
)
IN_BACKWARD = (
    "_engine_run_backward (torch/autograd/graph.py:979)",
    "backward (torch/autograd/__init__.py:395)",
    "Tensor.backward (torch/_tensor.py:623)",
    "<module> (train.py:33)",
)
IN_BARRIER = (
    "barrier (torch/distributed/distributed_c10d.py:5356)",
    "_exception_logger.<locals>.wrapper (torch/distributed/c10d_logger.py:83)",
    "<module> (train.py:32)",
)
IN_LOADER = (
    "_PollLikeSelector.select (selectors.py:415)",
    "wait (multiprocessing/connection.py:947)",
    "Connection._poll (multiprocessing/connection.py:440)",
    "Queue.get (multiprocessing/queues.py:113)",
    "_MultiProcessingDataLoaderIter._try_get_data (torch/utils/data/dataloader.py:1291)",
    "_BaseDataLoaderIter.__next__ (torch/utils/data/dataloader.py:725)",
    "<module> (train.py:29)",
)


def at(rank: int, *frames: str, phase: int = BACKWARD, seq: int = 2) -> RankInspection:
    """Return a rank that sleeps at step 10 with these frames."""
    pid = 8500 + rank
    return RankInspection(rank, 10, phase, seq, "S", 0.001, dump(pid, *frames) if frames else "")


def waiting(rank: int) -> RankInspection:
    return at(rank, *IN_BACKWARD)


def named(*evidence: RankInspection) -> HangVerdict:
    """Return the hung rank. Fails unless it is the same for any order of the evidence."""
    [suspicion] = {find_hung_rank(order) for order in permutations(evidence)}
    return suspicion


STOPPED = replace(waiting(1), process_state="T")
SLEEPS = at(1, "M.forward (train.py:9)", *CALL, phase=FORWARD, seq=1)
LOADS = at(1, *IN_LOADER, phase=DATA, seq=0)
SPINS = replace(at(1, "M.forward (train.py:11)", *CALL, phase=FORWARD, seq=1), process_state="R", cpu_s=0.5)
HOOK = at(1, "F.backward (train.py:23)", "BackwardCFunction.apply (torch/autograd/function.py:325)",
          *IN_BACKWARD)  # fmt: skip
IN_CPP = replace(waiting(1), process_state="R", cpu_s=0.5)


@pytest.mark.parametrize("peers", [1, 3])
@pytest.mark.parametrize(
    ("culprit", "why"),
    [
        pytest.param(STOPPED, "stopped", id="SIGSTOP"),
        pytest.param(replace(STOPPED, process_state="Z"), "dead", id="zombie"),
        pytest.param(SLEEPS, "behind", id="never enters the collective"),
        pytest.param(LOADS, "behind", id="data loader"),
        pytest.param(SPINS, "behind", id="spins in Python"),
        pytest.param(HOOK, "F.backward (train.py)", id="hook in backward"),
        pytest.param(IN_CPP, "spins", id="stuck in C++ in backward"),
        pytest.param(replace(waiting(1), process_state="D"), "state D", id="blocked in the kernel"),
    ],
)
def test_the_hung_rank_is_named(culprit: RankInspection, why: str, peers: int) -> None:
    suspicion = named(culprit, *(waiting(rank) for rank in (0, 2, 3)[:peers]))
    assert (suspicion.rank, suspicion.outliers) == (1, (1,))
    assert why in suspicion.why


@pytest.mark.parametrize("culprit", [SLEEPS, LOADS, SPINS, HOOK])
@pytest.mark.parametrize("frames", [IN_BACKWARD, IN_BARRIER])
def test_the_stack_identifies_the_rank_even_if_the_script_publishes_no_phases(
    culprit: RankInspection, frames: tuple[str, ...]
) -> None:
    suspicion = named(replace(culprit, phase=DATA, phase_seq=0), at(0, *frames, phase=DATA, seq=0))
    assert suspicion.rank == 1
    assert "is not waiting in a collective" in suspicion.why


def test_a_rank_that_is_behind_in_steps_is_named_before_one_behind_in_phases() -> None:
    old = replace(waiting(2), step=9, phase_seq=9)
    assert named(waiting(0), SLEEPS, old).rank == 2


def test_a_rank_in_backward_is_suspect_when_the_others_wait_in_a_collective_of_the_script() -> None:
    assert named(at(0, *IN_BARRIER), waiting(1), at(2, *IN_BARRIER)).rank == 1


def test_a_rank_without_a_stack_is_suspect_when_all_others_wait() -> None:
    silent = replace(waiting(1), stack="py-spy gave no answer in 10 s")
    suspicion = named(waiting(0), silent, waiting(2))
    assert suspicion.rank == 1
    assert "no readable stack" in suspicion.why
    assert named(waiting(0), silent, SLEEPS).rank == 1


def test_c_frames_above_the_python_ones_are_skipped() -> None:
    native = ("pthread_cond_wait (libc.so.6)", "gloo::transport::tcp::Buffer (libtorch_cpu.so)")
    victim = at(0, *native, "<module> (train.py:33)")
    assert named(victim, at(1, "futex_wait (libc.so.6)", "<module> (train.py:33)")).rank == 1
    assert named(at(0, *native, *IN_BACKWARD), HOOK).rank == 1


def test_an_odd_stack_is_named_when_no_rank_waits_in_a_known_place() -> None:
    item = ("train_step (train.py:40)", "<module> (train.py:50)")
    odd = at(1, "augment (data.py:7)", "<module> (train.py:45)")
    suspicion = named(at(0, *item), odd, at(2, *item), at(3, *item))
    assert suspicion.rank == 1
    assert "a different stack" in suspicion.why


def test_the_sleeping_rank_is_named_when_the_others_poll_a_gpu() -> None:
    busy = [replace(waiting(rank), cpu_s=0.5, process_state="R") for rank in (0, 2, 3)]
    assert named(waiting(1), *busy).rank == 1


def test_several_stopped_ranks_are_all_named() -> None:
    suspicion = named(STOPPED, waiting(0), replace(waiting(2), process_state="T"))
    assert (suspicion.rank, suspicion.outliers) == (1, (1, 2))
    assert suspicion.why == "rank 1 is stopped (state T), like rank 2"


def test_a_process_held_by_a_debugger_is_not_stopped() -> None:
    assert named(replace(waiting(0), process_state="t"), SLEEPS).rank == 1


def test_inconclusive_evidence_is_reported_as_such() -> None:
    suspicion = named(waiting(2), waiting(1), waiting(3))
    assert (suspicion.rank, suspicion.outliers) == (1, (1, 2, 3))
    assert "does not distinguish" in suspicion.why


def test_a_single_rank_is_named_and_no_rank_is_an_error() -> None:
    assert find_hung_rank((LOADS,)).rank == 1
    with pytest.raises(ValueError, match="without inspections"):
        find_hung_rank(())


def test_stacks_are_grouped_regardless_of_lines_ids_and_states() -> None:
    def loading(rank: int, line: int) -> RankInspection:
        frames = (f"Queue.get (multiprocessing/queues.py:{line})", "<module> (train.py:29)")
        more = FEEDER.format(tid=9000 + rank)
        status = "active" if rank % 2 else "idle"
        return replace(at(rank), stack=dump(rank, *frames, status=status, more=more))

    groups = group_stacks((loading(3, 113), waiting(1), loading(0, 115), loading(2, 113)))
    assert [group.ranks for group in groups] == [(1,), (0, 2, 3)]
    assert groups[1].stack == (
        'Thread "MainThread"\n    Queue.get (multiprocessing/queues.py:115)\n    <module> (train.py:29)\n'
        'Thread "QueueFeederThread"\n    Condition.wait (threading.py:327)\n'
        "    Queue._feed (multiprocessing/queues.py:231)\n    Thread.run (threading.py:982)"
    )


STACKS = ["", "Thread ", "no such process", *(
    dump(1, *frames) for frames in (IN_BACKWARD, IN_BARRIER, IN_LOADER, CALL, ())
)]  # fmt: skip
EVIDENCE = st.builds(
    RankInspection, st.integers(0, 7), st.integers(0, 3), st.integers(0, 10), st.integers(0, 3),
    st.sampled_from(["R", "S", "D", "T", "t", "Z", ""]), st.sampled_from([0.0, 0.01, 0.5]),
    st.sampled_from(STACKS),
)  # fmt: skip


@given(st.lists(EVIDENCE, min_size=1, max_size=8, unique_by=lambda each: each.rank).map(tuple))
def test_any_evidence_names_one_rank_of_its_outliers(evidence: tuple[RankInspection, ...]) -> None:
    suspicion = find_hung_rank(evidence)
    assert suspicion.rank in suspicion.outliers
    assert set(suspicion.outliers) <= {each.rank for each in evidence}
    assert suspicion.why
    assert sum(len(group.ranks) for group in group_stacks(evidence)) == len(evidence)

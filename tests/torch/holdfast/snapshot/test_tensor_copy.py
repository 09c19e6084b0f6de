from __future__ import annotations

import os
import signal
import threading

import pytest
import torch

from holdfast.snapshot import tensor_copy


@pytest.mark.parametrize("alone_bytes", [0, 1 << 30], ids=["several threads", "one thread"])
@pytest.mark.parametrize("small_bytes", [0, 1 << 30], ids=["piece by piece", "in one call"])
@pytest.mark.parametrize("adjacent", [True, False], ids=["as in a slot", "each elsewhere"])
@pytest.mark.parametrize("fresh", [True, False], ids=["into new memory", "into used memory"])
def test_copies_are_equal_for_any_size_and_layout(
    monkeypatch: pytest.MonkeyPatch, alone_bytes: int, small_bytes: int, adjacent: bool, fresh: bool
) -> None:
    monkeypatch.setattr(tensor_copy, "ALONE_BYTES", alone_bytes)
    monkeypatch.setattr(tensor_copy, "AHEAD_BYTES", 1000)
    monkeypatch.setattr(tensor_copy, "SMALL_BYTES", small_bytes)
    monkeypatch.setattr(tensor_copy, "FRESH_BYTES", 5000)
    monkeypatch.setattr(tensor_copy, "THREADS", 3)
    sources = [torch.randn(n) for n in (0, 1, 7, 100_003)]
    sources += [torch.randn(40, 30).t(), torch.tensor(3.0), torch.randn(5, 5).bfloat16()]
    targets = _one_behind_the_other(sources) if adjacent else [torch.full_like(s, -1.0) for s in sources]
    copying = tensor_copy.ParallelCopy(targets, sources, fresh=fresh)
    for _ in range(2):
        copying.run()
        assert all(torch.equal(target, source) for target, source in zip(targets, sources, strict=True))
        for source in sources:
            source.mul_(2.0)


def _one_behind_the_other(sources: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return targets like the sources, contiguous, in one piece of memory but in another order."""
    ordered = sorted(range(len(sources)), key=lambda at: -sources[at].element_size())
    memory, begin = torch.full((sum(each.nbytes for each in sources),), 255, dtype=torch.uint8), 0
    targets: dict[int, torch.Tensor] = {}
    for at in ordered:
        source = sources[at]
        targets[at] = memory[begin : begin + source.nbytes].view(source.dtype).view(source.shape)
        begin += source.nbytes
    return [targets[at] for at in range(len(sources))]


def test_a_failure_in_another_thread_is_raised_after_all_threads_have_finished() -> None:
    sources = [torch.ones(10, dtype=torch.uint8)]
    copying = tensor_copy.ParallelCopy([torch.zeros(10, dtype=torch.uint8)], sources)
    others = threading.Event()

    def fail(_moved: object) -> None:
        raise MemoryError("no room")

    copying._other_work = [lambda _moved: others.set(), fail]
    with pytest.raises(MemoryError, match="no room"):
        copying.run()
    assert others.is_set()
    copying._other_work = []
    copying.run()


def test_a_forked_child_copies_with_its_own_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_copy, "ALONE_BYTES", 0)
    monkeypatch.setattr(tensor_copy, "AHEAD_BYTES", 0)
    source = torch.arange(1000)  # so few that torch needs no threads, which a fork would lose
    target = torch.zeros_like(source)
    copying = tensor_copy.ParallelCopy([target], [source])
    assert copying._other_work
    copying.run()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(30)  # ends a child that waits for its parent's threads
        source.add_(1)
        copying.run()
        os._exit(0 if torch.equal(source, target) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_shares_cover_every_byte_once_and_none_exceeds_its_limit() -> None:
    pairs = [(torch.zeros(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)) for size in (10, 95)]
    shares = tensor_copy._shares(pairs, 45, 30)
    assert [sum(source.nbytes for _, source in share) for share in shares] == [45, 30, 30]
    for target, source in (pair for share in shares for pair in share):
        target += source
    assert all(torch.equal(target, source) for target, source in pairs)

from __future__ import annotations

import pytest
import torch

from holdfast import memcopy


@pytest.mark.parametrize("alone_bytes", [0, 1 << 30], ids=["shared out", "alone"])
@pytest.mark.parametrize("small_bytes", [0, 1 << 30], ids=["piece by piece", "in one call"])
def test_what_is_copied_is_equal_whatever_its_size_and_layout(
    monkeypatch: pytest.MonkeyPatch, alone_bytes: int, small_bytes: int
) -> None:
    monkeypatch.setattr(memcopy, "ALONE_BYTES", alone_bytes)
    monkeypatch.setattr(memcopy, "SMALL_BYTES", small_bytes)
    monkeypatch.setattr(memcopy, "THREADS", 3)
    sources = [torch.randn(n) for n in (0, 1, 7, 100_003)]
    sources += [torch.randn(40, 30).t(), torch.tensor(3.0), torch.randn(5, 5).bfloat16()]
    targets = [torch.full_like(each, -1.0, memory_format=torch.contiguous_format) for each in sources]
    copying = memcopy.Copying(targets, sources)
    for _ in range(2):
        copying.run()
        assert all(torch.equal(target, source) for target, source in zip(targets, sources, strict=True))
        for source in sources:
            source.mul_(2.0)


def test_shares_cover_every_byte_once_and_none_is_larger_than_it_may_be() -> None:
    pairs = [(torch.zeros(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)) for size in (10, 95)]
    shares = memcopy._shares(pairs, 35)
    assert [sum(source.nbytes for _, source in share) for share in shares] == [35, 35, 35]
    for target, source in (pair for share in shares for pair in share):
        target += source
    assert all(torch.equal(target, source) for target, source in pairs)

from __future__ import annotations

import pytest
import torch

from holdfast import memcopy


@pytest.mark.parametrize("alone_bytes", [0, 1 << 30], ids=["shared out", "alone"])
def test_what_is_copied_is_equal_whatever_its_size_and_layout(
    monkeypatch: pytest.MonkeyPatch, alone_bytes: int
) -> None:
    monkeypatch.setattr(memcopy, "ALONE_BYTES", alone_bytes)
    monkeypatch.setattr(memcopy, "THREADS", 3)
    sources = [torch.randn(n) for n in (0, 1, 7, 100_003)]
    sources += [torch.randn(40, 30).t(), torch.tensor(3.0), torch.randn(5, 5).bfloat16()]
    targets = [torch.full_like(each, -1.0, memory_format=torch.contiguous_format) for each in sources]
    memcopy.copy(targets, sources)
    assert all(torch.equal(target, source) for target, source in zip(targets, sources, strict=True))


def test_shares_cover_every_byte_once_and_none_is_larger_than_it_may_be() -> None:
    pieces = [(1000, 5000, 10), (2000, 6000, 0), (3000, 7000, 95)]
    shares = memcopy._shares(pieces, 35)
    assert [sum(size for *_, size in share) for share in shares] == [35, 35, 35]
    copied = {at + n for share in shares for at, _, size in share for n in range(size)}
    assert copied == {*range(1000, 1010), *range(3000, 3095)}

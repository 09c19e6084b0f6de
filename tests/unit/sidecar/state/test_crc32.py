from __future__ import annotations

import zlib

from hypothesis import given
from hypothesis import strategies as st

from sidecar.state.snapshot_send import crc32


@given(st.binary(max_size=4000), st.integers(0, 2**32 - 1))
def test_every_implementation_computes_the_same_checksum(content: bytes, before: int) -> None:
    assert crc32(content, before) == zlib.crc32(content, before)
    with memoryview(content) as view:
        assert crc32(view) == zlib.crc32(content)

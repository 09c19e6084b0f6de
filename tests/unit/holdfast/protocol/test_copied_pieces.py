"""A reader of the page finds the number of pieces copied so far."""

from __future__ import annotations

import mmap
import struct

import pytest

from holdfast.protocol.progress import PAGE_BYTES, copied


def page(count: int) -> bytearray:
    content = bytearray(PAGE_BYTES)
    struct.pack_into("<8sII", content, 0, b"holdfast", 3, PAGE_BYTES)
    struct.pack_into("<Q", content, 960, count)
    return content


@pytest.mark.parametrize("count", [0, 1, 2**32 + 5, 2**64 - 1])
def test_the_counter_is_a_64_bit_word_at_byte_960(count: int) -> None:
    content = page(count)
    content[952:960] = content[968:976] = b"\xff" * 8
    mapped = mmap.mmap(-1, PAGE_BYTES)
    mapped[:] = bytes(content)
    assert [copied(each) for each in (bytes(content), content, memoryview(content), mapped)] == [count] * 4
    mapped.close()


def test_the_counter_is_read_while_a_write_is_unfinished() -> None:
    content = page(9)
    content[16] = 1  # the sequence is odd
    assert copied(content) == 9


def test_bytes_that_are_not_a_page_count_nothing() -> None:
    other = page(9)
    other[0] ^= 1
    newer = page(9)
    newer[8] += 1
    for content in (b"", bytes(page(9))[:-1], other, newer):
        assert copied(content) == 0

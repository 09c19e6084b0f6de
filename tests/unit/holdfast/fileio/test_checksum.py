from __future__ import annotations

import os
import random
import tracemalloc
import zlib
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from holdfast.fileio.bulk_copy import FileBatch
from holdfast.fileio.checksum import CHUNK_BYTES, RunningChecksum, checksum, chunk_crcs, combine, file_crcs


@given(st.lists(st.binary(max_size=40), max_size=12), st.integers(1, 30))
def test_pieces_of_any_size_give_the_checksums_of_the_whole(pieces: list[bytes], chunk_bytes: int) -> None:
    running = RunningChecksum(chunk_bytes)
    for piece in pieces:
        running.update(piece)
    whole = b"".join(pieces)

    expected = tuple(zlib.crc32(whole[at : at + chunk_bytes]) for at in range(0, len(whole), chunk_bytes))
    assert running.crcs() == chunk_crcs(memoryview(whole), chunk_bytes) == expected
    assert running.checksum() == combine(expected)


def test_content_of_many_chunks_is_hashed_chunk_by_chunk(tmp_path: Path) -> None:
    content = random.Random(1).randbytes(1000) * (2 * CHUNK_BYTES // 1000 + 1)
    path = tmp_path / "content"
    path.write_bytes(content)
    descriptor = os.open(path, os.O_RDONLY)
    crcs = file_crcs(descriptor, len(content), CHUNK_BYTES)
    os.close(descriptor)

    assert len(crcs) == 3
    assert crcs == chunk_crcs(memoryview(content))
    assert checksum(memoryview(content)) == combine(crcs)
    assert crcs[2] == zlib.crc32(content[2 * CHUNK_BYTES :])


def test_a_file_that_ends_early_has_other_checksums(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"abc")
    descriptor = os.open(tmp_path / "short", os.O_RDONLY)
    assert file_crcs(descriptor, 10, 4) == (zlib.crc32(b"abc"), 0, 0)
    os.close(descriptor)


def test_neither_hashing_nor_copying_a_file_puts_a_chunk_of_it_on_the_heap(tmp_path: Path) -> None:
    size = 2 * CHUNK_BYTES + 5
    with open(tmp_path / "content", "wb+") as file:
        file.truncate(size)
        tracemalloc.start()
        try:
            crcs = file_crcs(file.fileno(), size, CHUNK_BYTES)
            with FileBatch() as batch:
                copied = batch.copy(tmp_path / "content", tmp_path / "copy")
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert copied.crc32 == crcs
    assert peak_bytes < CHUNK_BYTES // 2, "a thread's heap keeps memory that it once held"

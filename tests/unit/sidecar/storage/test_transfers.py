"""Files are divided into objects without gaps, under keys that sort in the order of the file."""

from __future__ import annotations

import errno
import zlib
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint.manifest import MAX_PART_BYTES, ObjectLayout
from holdfast.fileio.checksum import CHUNK_BYTES, FileEntry
from sidecar.storage import transfers
from sidecar.storage.object_client import ObjectClient

LAYOUTS = st.builds(ObjectLayout, st.just("e1-g1-0"), st.sampled_from([CHUNK_BYTES, 2 * CHUNK_BYTES]))


@given(st.integers(0, 300 * CHUNK_BYTES), LAYOUTS)
def test_the_parts_of_a_file_cover_it_without_gaps(size: int, layout: ObjectLayout) -> None:
    found = transfers.parts("runs/step-00000007", "a.bin", size, layout)
    keys = [key for key, _, _ in found]
    assert sorted(set(keys)) == keys
    assert all(key.startswith("runs/step-00000007/e1-g1-0/a.bin/") for key in keys)
    assert [begin for _, begin, _ in found] == [0, *(end for _, _, end in found[:-1])]
    assert found[-1][2] == size
    assert all(0 < end - begin <= layout.part_bytes for _, begin, end in found) or size == 0
    assert len(found) == max(1, -(-size // layout.part_bytes))


@given(st.integers(0, 1 << 45))
def test_parts_are_whole_chunks_that_the_manifest_allows(size: int) -> None:
    found = transfers.part_bytes(size)
    assert found % CHUNK_BYTES == 0
    assert CHUNK_BYTES <= found <= min(transfers.LARGEST, MAX_PART_BYTES)


def test_a_file_without_a_layout_is_one_object_of_its_name() -> None:
    assert transfers.parts("runs/step-00000007", "a.bin", 5, None) == [("runs/step-00000007/a.bin", 0, 5)]


def test_a_download_does_not_write_through_a_link_that_a_script_has_made(tmp_path: Path) -> None:
    """A file that exists but differs is downloaded again, and a script may have made it a link."""
    unused = cast("ObjectClient", None)
    other = tmp_path / "other"
    other.write_bytes(b"content of another file")
    target = tmp_path / "copies" / "a.bin"
    target.parent.mkdir()
    entry = FileEntry("a.bin", 4, CHUNK_BYTES, (zlib.crc32(b"abcd"),))
    for link in (target.with_name(".a.bin.partial"), target):
        link.symlink_to(other)
        with pytest.raises(OSError, match="symbolic link") as raised:
            transfers.download(unused, "runs/step-00000007", entry, None, target, lambda: None)
        assert raised.value.errno == errno.ELOOP
        target.with_name(".a.bin.partial").unlink()
    assert other.read_bytes() == b"content of another file"

"""Files are divided into objects without gaps, under keys that sort in the order of the file."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint.manifest import MAX_PART_BYTES, ObjectLayout
from holdfast.fileio.checksum import CHUNK_BYTES
from sidecar.storage import transfers

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

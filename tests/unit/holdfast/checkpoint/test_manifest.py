"""The bytes of a manifest are read back exactly, and each refusal has its exact text."""

from __future__ import annotations

import dataclasses
import json
import random
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint import manifest as manifest_module
from holdfast.checkpoint.manifest import (
    InvalidCheckpoint,
    Manifest,
    NewerFormat,
    ObjectLayout,
    is_file_name,
    pack,
    unpack,
)
from holdfast.fileio.checksum import FileEntry
from holdfast.protocol.lineage import Lineage

SAMPLE = Manifest(
    generation=3,
    step=1200,
    world_size=2,
    created=1.75e9,
    files=(FileEntry("rank-00000.bin", 10_000, 4096, (1, 2, 2**32 - 1)),),
    meta={"model": ["a", {"b": None}], "lr": 0.1},
)
texts = st.text(max_size=20)


def signed(change: Any) -> bytes:
    """Return the sample with its body changed and the right checksum."""
    body = json.loads(pack(SAMPLE))
    del body["crc32"]
    head = json.dumps({**body, **change}).encode()[:-1]
    return head + b',"crc32":%d}' % zlib.crc32(head)


def signed_file(**change: Any) -> bytes:
    entry = {"bytes": 10_000, "chunk_bytes": 4096, "crc32": [1, 2, 3], **change}
    return signed({"files": {"rank-00000.bin": entry}})


def test_the_bytes_of_a_manifest_are_pinned() -> None:
    assert pack(SAMPLE) == (
        b'{"format":1,"generation":3,"step":1200,"world_size":2,"created":1750000000.0,'
        b'"files":{"rank-00000.bin":{"bytes":10000,"chunk_bytes":4096,"crc32":[1,2,4294967295]}},'
        b'"meta":{"model":["a",{"b":null}],"lr":0.1},"crc32":1629089789}\n'
    )


@given(
    st.integers(0, 2**63 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    st.dictionaries(texts, st.lists(texts | st.integers(-(2**63), 2**63) | st.booleans())),
)
def test_a_packed_manifest_unpacks_to_the_same(step: int, created: float, meta: dict[str, Any]) -> None:
    manifest = dataclasses.replace(SAMPLE, step=step, created=created, meta=meta)
    assert unpack(pack(manifest)) == manifest


def test_any_flipped_bit_is_detected() -> None:
    raw = pack(SAMPLE)
    for bit in range(len(raw) * 8 - 8):  # the line end may be lost
        damaged = bytearray(raw)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(InvalidCheckpoint, match=r"damaged|truncated"):
            unpack(bytes(damaged))


def test_a_manifest_cut_anywhere_is_refused() -> None:
    raw = pack(SAMPLE)
    for end in range(len(raw) - 1):
        with pytest.raises(InvalidCheckpoint, match=r"damaged|truncated"):
            unpack(raw[:end])


def test_a_lineage_is_kept_and_a_manifest_without_one_is_accepted() -> None:
    known = (Lineage(2, 0), Lineage(3, 1200))
    raw = pack(dataclasses.replace(SAMPLE, lineage=known))
    assert b'"lineage":[[2,0],[3,1200]]' in raw
    assert unpack(raw).lineage == known
    assert unpack(pack(SAMPLE)).lineage == ()


HOSTILE = {
    "more than 67108864 bytes": bytes((64 << 20) + 1),
    "has format '1'": signed({"format": "1"}),
    "has format True": signed({"format": True}),
    "has format None": signed({"format": None}),
    "has format 0": signed({"format": 0}),
    "has step -1": signed({"step": -1}),
    "has step True": signed({"step": True}),
    "has step 9223372036854775808": signed({"step": 2**63}),
    "has lineage 'x'": signed({"lineage": "x"}),
    "has lineage ": signed({"lineage": [[1, 1]] * 257}),
    "has 1 in its lineage": signed({"lineage": [1]}),
    "in its lineage, expected a generation and a step": signed({"lineage": [[1]]}),
    "in its lineage, expected a generation": signed({"lineage": [[1, -1]]}),
    "in its lineage, expected": signed({"lineage": [[True, 1]]}),
    "has generation 'x'": signed({"generation": "x"}),
    "has world_size 0, expected 1 to": signed({"world_size": 0}),
    "has created 'now'": signed({"created": "now"}),
    "has Infinity": signed({"created": float("inf")}),
    "files or meta that is not": signed({"meta": []}),
    "has files or meta": signed({"files": []}),
    "has an integer of 5000 digits": signed({"step": 10**4000}).replace(b"0" * 4000, b"0" * 4999),
    "file name '../../etc/passwd'": signed({"files": {"../../etc/passwd": {}}}),
    "file name '.hidden'": signed({"files": {".hidden": {}}}),
    "file name 'manifest.json'": signed({"files": {"manifest.json": {}}}),
    "file name ''": signed({"files": {"": {}}}),
    "that is not an object": signed({"files": {"a": 1}}),
    "has bytes -1": signed_file(bytes=-1),
    "has chunk_bytes 1,": signed_file(chunk_bytes=1),
    "has chunk_bytes 1099511627776": signed_file(chunk_bytes=2**40),
    "without one checksum for each chunk": signed_file(crc32=[1, 2]),
    "rank-00000.bin without one checksum": signed_file(crc32="123"),
    "bytes 9223372036854775808": signed_file(bytes=2**63),
    "a checksum that is not a 32-bit number": signed_file(crc32=[1, 2, 2**32]),
    "checksum that is not a 32-bit number": signed_file(crc32=[1, 2, 1.0]),
}


@pytest.mark.parametrize("why", HOSTILE)
def test_a_hostile_manifest_is_refused_in_one_line(why: str) -> None:
    raw = HOSTILE[why]
    if why.endswith("5000 digits"):
        head = raw[: raw.rindex(b',"crc32"')]
        raw = head + b',"crc32":%d}' % zlib.crc32(head)
        why = "has an integer of"
    with pytest.raises(InvalidCheckpoint, match=why.replace("?", r"\?")) as caught:
        unpack(raw)
    assert str(caught.value).isprintable()


def test_deep_nesting_is_refused() -> None:
    head = b'{"format":1,"meta":' + b'{"a":' * 200_000 + b"1" + b"}" * 200_000
    with pytest.raises(InvalidCheckpoint, match="nested too deeply"):
        unpack(head + b',"crc32":%d}' % zlib.crc32(head))


@given(st.binary(max_size=60))
def test_any_signed_bytes_are_unpacked_or_refused(head: bytes) -> None:
    with pytest.raises(InvalidCheckpoint):
        unpack(head + b',"crc32":%d}' % zlib.crc32(head))


def test_a_newer_format_is_refused_as_newer() -> None:
    with pytest.raises(NewerFormat, match="has format 2, but this holdfast reads only up to 1: update it"):
        unpack(signed({"format": 2, "files": "something new"}))


@pytest.mark.parametrize("meta", [{"a": float("nan")}, {"a": {1, 2}}, {"a": b"x"}])
def test_metadata_that_is_not_json_is_refused_before_anything_is_written(meta: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="meta of a checkpoint is not JSON"):
        pack(dataclasses.replace(SAMPLE, meta=meta))


@pytest.mark.parametrize(
    ("name", "good"),
    [
        ("replicated.safetensors", True),
        ("rank-00000.bin", True),
        ("_a", True),
        ("", False),
        (".", False),
        ("..", False),
        (".tmp", False),
        ("a/b", False),
        ("a\\b", False),
        ("a\n", False),
        ("a\0", False),
        ("é", False),
        ("manifest.json", False),
        ("x" * 129, False),
    ],
)
def test_a_file_name_is_never_a_path(name: str, good: bool) -> None:
    assert is_file_name(name) is good


def test_a_file_has_the_same_checksum_as_in_the_arena() -> None:
    assert SAMPLE.files[0].checksum == zlib.crc32(
        (1).to_bytes(4, "little") + (2).to_bytes(4, "little") + b"\xff" * 4
    )


def test_random_bytes_are_refused() -> None:
    chance = random.Random(1)
    for size in (0, 1, 20, 1000):
        with pytest.raises(InvalidCheckpoint):
            unpack(chance.randbytes(size))


def test_the_epoch_of_the_supervisor_is_kept_and_may_be_absent() -> None:
    raw = pack(dataclasses.replace(SAMPLE, epoch=7))
    assert b',"epoch":7,"crc32":' in raw
    assert unpack(raw).epoch == 7
    assert b"epoch" not in pack(SAMPLE)
    assert unpack(pack(SAMPLE)).epoch == 0


def test_how_files_are_divided_into_objects_is_kept_and_nothing_is_written_for_a_directory() -> None:
    raw = pack(dataclasses.replace(SAMPLE, objects=ObjectLayout("e1-g2-0f", 8192)))
    assert b',"objects":{"folder":"e1-g2-0f","part_bytes":8192},"crc32":' in raw
    assert unpack(raw).objects == ObjectLayout("e1-g2-0f", 8192)
    assert b"objects" not in pack(SAMPLE)
    assert unpack(pack(SAMPLE)).objects is None


@pytest.mark.parametrize("size", [4096, 64 << 20])
def test_the_least_and_the_largest_part_are_accepted(size: int) -> None:
    layout = {"folder": "a", "part_bytes": size}
    assert unpack(signed({"objects": layout})).objects == ObjectLayout("a", size)
    wrong = 4095 if size == 4096 else size + 1
    with pytest.raises(InvalidCheckpoint) as caught:
        unpack(signed({"objects": {**layout, "part_bytes": wrong}}))
    assert str(caught.value) == f"has part_bytes {wrong}, expected 4096 to 67108864"


@pytest.mark.parametrize("field", ["generation", "step", "world_size", "epoch"])
def test_the_largest_number_is_accepted_and_the_next_one_is_refused(field: str) -> None:
    largest = 2**63 - 1
    assert getattr(unpack(signed({field: largest})), field) == largest
    least = 1 if field == "world_size" else 0
    assert getattr(unpack(signed({field: least})), field) == least
    for wrong in (least - 1, largest + 1):
        with pytest.raises(InvalidCheckpoint) as caught:
            unpack(signed({field: wrong}))
        assert str(caught.value) == f"has {field} {wrong}, expected {least} to {largest}"


def test_the_numbers_of_a_lineage_have_the_same_bounds() -> None:
    largest = 2**63 - 1
    known = (Lineage(0, 0), Lineage(largest, largest))
    assert unpack(pack(dataclasses.replace(SAMPLE, lineage=known))).lineage == known
    for wrong in ([0, largest + 1], [largest + 1, 0], [-1, 0], [0, -1]):
        with pytest.raises(InvalidCheckpoint, match="lineage"):
            unpack(signed({"lineage": [wrong]}))


def test_a_lineage_has_at_most_256_entries() -> None:
    assert len(unpack(signed({"lineage": [[n, n] for n in range(256)]})).lineage) == 256
    with pytest.raises(InvalidCheckpoint) as caught:
        unpack(signed({"lineage": [[n, n] for n in range(257)]}))
    assert str(caught.value) == "has lineage a list, expected a list of at most 256"


def test_a_manifest_has_at_most_64_mib(monkeypatch: pytest.MonkeyPatch) -> None:
    assert manifest_module.MAX_BYTES == 64 << 20
    raw = pack(SAMPLE)
    monkeypatch.setattr(manifest_module, "MAX_BYTES", len(raw))
    assert unpack(raw) == SAMPLE
    monkeypatch.setattr(manifest_module, "MAX_BYTES", len(raw) - 1)
    with pytest.raises(InvalidCheckpoint) as caught:
        unpack(raw)
    assert str(caught.value) == f"has more than {len(raw) - 1} bytes"


def test_a_manifest_has_a_bounded_number_of_values(monkeypatch: pytest.MonkeyPatch) -> None:
    assert manifest_module.MAX_VALUES == 4_000_000
    monkeypatch.setattr(manifest_module, "MAX_VALUES", 10)
    with pytest.raises(InvalidCheckpoint) as caught:
        pack(SAMPLE)
    assert str(caught.value) == "has more than 10 values"


@pytest.mark.parametrize("size", [4096, 64 << 20])
def test_the_least_and_the_largest_chunk_are_accepted(size: int) -> None:
    file = unpack(signed_file(bytes=size, chunk_bytes=size, crc32=[3])).files[0]
    assert file == FileEntry("rank-00000.bin", size, size, (3,))
    wrong = 4095 if size == 4096 else size + 1
    with pytest.raises(InvalidCheckpoint) as caught:
        unpack(signed_file(bytes=size, chunk_bytes=wrong, crc32=[3]))
    assert str(caught.value) == f"has chunk_bytes {wrong}, expected 4096 to 67108864"


def test_an_empty_file_has_no_checksums() -> None:
    assert unpack(signed_file(bytes=0, crc32=[])).files[0].bytes == 0


def test_a_checksum_is_any_32_bits() -> None:
    assert unpack(signed_file(crc32=[0, 1, 2**32 - 1])).files[0].crc32 == (0, 1, 2**32 - 1)
    for wrong in (-1, 2**32, True, "1"):
        with pytest.raises(InvalidCheckpoint) as caught:
            unpack(signed_file(crc32=[0, 1, wrong]))
        assert str(caught.value) == "has a file rank-00000.bin with a checksum that is not a 32-bit number"


EXACT = {
    "has format None, expected 1": signed({"format": None}),
    "has files or meta that is not an object": signed({"files": 1}),
    "has created 'nan', expected seconds since the epoch": signed({"created": "nan"}),
    "has 'x' in its lineage, expected a generation and a step": signed({"lineage": ["x"]}),
    "has a list in its lineage, expected a generation and a step": signed({"lineage": [[1, 2, 3]]}),
    "has the file name '', expected letters, digits, '.', '_' and '-', no leading '.'": signed(
        {"files": {"": {}}}
    ),
    "has a file a that is not an object": signed({"files": {"a": []}}),
    "has a file rank-00000.bin without one checksum for each chunk": signed_file(crc32=[1, 2, 3, 4]),
    "has bytes None, expected 0 to 9223372036854775807": signed_file(bytes=None),
    "has NaN, which is not JSON": signed({"step": float("nan")}),
    "has objects 1, expected an object": signed({"objects": 1}),
    "has the folder '../a', expected letters, digits, '.', '_' and '-', no leading '.'": signed(
        {"objects": {"folder": "../a", "part_bytes": 4096}}
    ),
    "has the folder None, expected letters, digits, '.', '_' and '-', no leading '.'": signed(
        {"objects": {"part_bytes": 4096}}
    ),
    "has part_bytes 6144, expected a multiple of the chunk size 4096": signed(
        {"objects": {"folder": "a", "part_bytes": 6144}}
    ),
    "is damaged: its checksum does not match": pack(SAMPLE).replace(b"1629089789", b"1629089788"),
    "is truncated or damaged: it does not end with its checksum": pack(SAMPLE)[:-2],
}


@pytest.mark.parametrize("text", EXACT)
def test_each_refusal_has_exactly_this_text(text: str) -> None:
    with pytest.raises(InvalidCheckpoint) as caught:
        unpack(EXACT[text])
    assert str(caught.value) == text


def test_only_one_line_end_may_follow_the_checksum_and_none_may_precede_it() -> None:
    raw = pack(SAMPLE)
    assert unpack(raw[:-1]) == SAMPLE
    for wrong in (raw + b"\n", raw[:-1] + b" \n", b"", raw[raw.rindex(b',"crc32"') :]):
        with pytest.raises(InvalidCheckpoint):
            unpack(wrong)


def test_a_manifest_that_could_not_be_read_back_is_not_packed() -> None:
    with pytest.raises(InvalidCheckpoint) as caught:
        pack(dataclasses.replace(SAMPLE, step=-1))
    assert str(caught.value) == "has step -1, expected 0 to 9223372036854775807"


def test_a_file_name_has_at_most_128_characters() -> None:
    assert is_file_name("x" * 128)

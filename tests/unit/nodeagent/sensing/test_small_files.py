from __future__ import annotations

import os
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from nodeagent.sensing import small_files


@given(st.binary(max_size=40))
def test_no_bytes_make_a_number_or_text_parser_raise(raw: bytes) -> None:
    found = small_files.parse_number(raw)
    assert found is None or -(10**20) < found < 10**20
    words = small_files.parse_text(raw)
    assert words is None or (words.isprintable() and words.isascii())


def test_text_that_is_not_a_number_is_none() -> None:
    for raw in (b"", b"N/A\n", b"-", b"1.5", b"0x10", b"1 2", b"9" * 21, "²".encode(), None):
        assert small_files.parse_number(raw) is None
    assert small_files.parse_number(b" 42\n") == 42
    assert small_files.parse_number(b"-1") == -1


def test_a_missing_file_or_a_directory_has_no_content(tmp_path: Path) -> None:
    assert small_files.try_read(str(tmp_path / "gone")) is None
    assert small_files.try_read(str(tmp_path)) is None
    assert small_files.list_names(str(tmp_path / "gone")) == []
    assert not small_files.exists(str(tmp_path / "gone"))


def test_only_the_beginning_of_a_large_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(b"x" * 100_000)
    assert small_files.try_read(str(tmp_path / "large"), 5000) == b"x" * 5000


@given(st.binary(max_size=40))
def test_any_path_is_printable(raw: bytes) -> None:
    found = small_files.printable(os.fsdecode(raw))
    assert found.isprintable()
    found.encode()

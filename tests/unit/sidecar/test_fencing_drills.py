from __future__ import annotations

import re
from pathlib import Path

import pytest

from holdfast.fileio import durable
from holdfast.snapshot.member_directory import DRILLED
from sidecar.fencing import CompletedDrills


def test_the_next_sidecar_knows_which_drills_were_carried_out(tmp_path: Path) -> None:
    assert CompletedDrills(tmp_path).newest == 0
    CompletedDrills(tmp_path).remember(1_234_567_890_123_456)
    assert CompletedDrills(tmp_path).newest == 1_234_567_890_123_456
    assert [each.name for each in tmp_path.iterdir()] == [DRILLED]


@pytest.mark.parametrize("content", [b"", b"x", b"-7", b"1" * 99_999, b"\xff"])
def test_unreadable_content_is_not_a_number(content: bytes, tmp_path: Path) -> None:
    (tmp_path / DRILLED).write_bytes(content)
    assert 0 <= CompletedDrills(tmp_path).newest < 10**40


def test_a_missing_folder_loses_the_record_but_not_the_drill(tmp_path: Path) -> None:
    made = CompletedDrills(tmp_path / "gone")
    made.remember(5)
    assert made.newest == 5


def test_a_record_is_not_written_through_a_link_that_a_script_has_made(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("content of another file")
    drills = CompletedDrills(tmp_path)
    seen = re.fullmatch(r"(.+)-(\d+)-x", durable.temporary_path(tmp_path, "x").name)
    assert seen is not None
    for later in range(1, 10):
        (tmp_path / f"{seen[1]}-{int(seen[2]) + later}-{DRILLED}").symlink_to(other)
    drills.remember(3)
    assert other.read_text() == "content of another file"

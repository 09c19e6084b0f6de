from __future__ import annotations

from pathlib import Path

import pytest

from nodeagent.sensing.baselines import FILE, MAX_BYTES, Forgotten, ForgottenBaselines, record_forget


def test_a_request_takes_effect_once_also_across_a_restart(tmp_path: Path) -> None:
    reader = ForgottenBaselines(tmp_path / "state")
    assert list(reader.take()) == []
    record_forget(tmp_path / "state", "gpus", "", "two GPUs were removed", 5.0)
    record_forget(tmp_path / "state", "nvlinks", "gpu/0000:1b:00.0", "", 6.0)
    assert list(reader.take()) == [Forgotten("gpus"), Forgotten("nvlinks", "gpu/0000:1b:00.0")]
    assert list(reader.take()) == []
    again = ForgottenBaselines(tmp_path / "state", reader.position())
    assert list(again.take()) == []
    record_forget(tmp_path / "state", "ports", "", "", 7.0)
    assert list(again.take()) == [Forgotten("ports")]


def test_malformed_lines_and_partial_ones_are_not_requests(tmp_path: Path) -> None:
    file = tmp_path / FILE
    file.write_bytes(
        b'\xff\n{}\n[1]\n{"baseline": "all"}\n{"baseline": "gpus", "entity": 3}\n{"baseline": ["gpus"]}\n'
    )
    reader = ForgottenBaselines(tmp_path)
    assert list(reader.take()) == []
    with file.open("ab") as more:
        more.write(b'{"baseline": "gpus"')
        more.flush()
        assert list(reader.take()) == []
        more.write(b"}\n")
    assert list(reader.take()) == [Forgotten("gpus")]


def test_a_replaced_file_is_read_from_its_start_and_an_endless_line_is_passed_over(tmp_path: Path) -> None:
    reader = ForgottenBaselines(tmp_path, 1000)
    record_forget(tmp_path, "gpus", "", "", 5.0)
    assert list(reader.take()) == [Forgotten("gpus")]
    (tmp_path / FILE).write_bytes(b"x" * (MAX_BYTES + 10) + b"\n")
    assert list(reader.take()) == []
    record_forget(tmp_path, "gpus", "", "", 5.0)
    assert list(reader.take()) == [Forgotten("gpus")]


@pytest.mark.parametrize("position", [None, -1, "5", True, 2.0])
def test_a_corrupt_position_counts_as_the_start(tmp_path: Path, position: object) -> None:
    record_forget(tmp_path, "gpus", "", "", 5.0)
    assert list(ForgottenBaselines(tmp_path, position).take()) == [Forgotten("gpus")]


def test_without_a_folder_there_are_no_requests() -> None:
    assert list(ForgottenBaselines(None).take()) == []

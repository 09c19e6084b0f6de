"""A log that cannot be written ends nothing."""

from __future__ import annotations

from pathlib import Path

from holdfast.process import logs


def test_a_log_is_created_with_its_folder_and_continued_at_its_end(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "warm" / "m0.log"
    for line in (b"one\n", b"two\n"):
        with logs.opened(path) as log:
            log.write(line)
    assert path.read_bytes() == b"one\ntwo\n"


def test_output_that_storage_refuses_is_discarded(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("in the way")
    with logs.opened(tmp_path / "logs" / "m0.log") as log:
        log.write(b"lost")
    assert (tmp_path / "logs").read_text() == "in the way"


def test_a_moved_log_is_still_written_and_its_end_is_read(tmp_path: Path) -> None:
    path, target = tmp_path / "warm" / "m0.log", tmp_path / "gen-0001" / "rank-0.log"
    with logs.opened(path) as log:
        assert logs.moved(path, target)
        log.write(b"one\ntwo\n")
    assert logs.tail(target, 4) == "two\n"
    assert not logs.moved(path, target)
    assert logs.tail(path, 4) == ""

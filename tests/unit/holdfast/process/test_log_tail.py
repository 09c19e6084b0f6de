from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.process import log_tail
from holdfast.process.log_tail import LogTails


def write(logs: Path, generation: int, rank: int, content: bytes) -> Path:
    path = logs / f"gen-{generation:04d}" / f"rank-{rank}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab") as file:
        file.write(content)
    return path


def test_lines_are_returned_once_with_their_rank_as_files_appear_and_grow(tmp_path: Path) -> None:
    following = LogTails(tmp_path / "logs")
    assert following.poll() == []
    write(tmp_path / "logs", 1, 0, b"one\ntwo\n")
    assert following.poll() == [(0, "one"), (0, "two")]
    assert following.poll() == []
    write(tmp_path / "logs", 1, 0, b"three\n\n")
    write(tmp_path / "logs", 1, 11, b"other\n")
    assert sorted(following.poll()) == [(0, ""), (0, "three"), (11, "other")]


def test_an_incomplete_line_is_held_until_it_is_complete_or_the_log_ends(tmp_path: Path) -> None:
    following = LogTails(tmp_path)
    write(tmp_path, 1, 0, b"half")
    assert following.poll() == []
    write(tmp_path, 1, 0, b" a line\nanother")
    assert following.poll() == [(0, "half a line")]
    assert following.close() == [(0, "another")]
    assert following.close() == []


def test_a_file_that_is_renamed_into_place_is_read_from_its_beginning(tmp_path: Path) -> None:
    following = LogTails(tmp_path)
    write(tmp_path, 1, 0, b"")
    warm = tmp_path / "warm" / "m-0-0.log"
    warm.parent.mkdir()
    with open(warm, "wb", buffering=0) as file:
        file.write(b"imported\n")
        assert following.poll() == []
        (tmp_path / "gen-0001").mkdir(exist_ok=True)
        warm.rename(tmp_path / "gen-0001" / "rank-1.log")
        assert following.poll() == [(1, "imported")]
        file.write(b"started\n")
        assert following.poll() == [(1, "started")]


def test_a_new_file_of_the_same_name_is_another_file(tmp_path: Path) -> None:
    following = LogTails(tmp_path)
    write(tmp_path, 1, 0, b"old line\nand a half")
    assert following.poll() == [(0, "old line")]
    new = tmp_path / "new"
    new.write_bytes(b"new\n")
    new.rename(tmp_path / "gen-0001" / "rank-0.log")
    assert following.poll() == [(0, "and a half"), (0, "new")]


def test_a_file_that_was_cut_is_read_again_from_its_beginning(tmp_path: Path) -> None:
    following = LogTails(tmp_path)
    path = write(tmp_path, 1, 0, b"long line\n")
    following.poll()
    path.write_bytes(b"new\n")
    assert following.poll() == [(0, "new")]


def test_the_last_lines_of_a_dead_rank_are_returned_when_its_next_process_starts(
    tmp_path: Path,
) -> None:
    following = LogTails(tmp_path)
    write(tmp_path, 1, 0, b"killed in the mid")
    assert following.poll() == []
    write(tmp_path, 2, 0, b"again\n")
    assert following.poll() == [(0, "again"), (0, "killed in the mid")]


def test_existing_content_can_be_skipped(tmp_path: Path) -> None:
    write(tmp_path, 1, 0, b"yesterday\nhal")
    following = LogTails(tmp_path, skip=True)
    assert following.poll() == []
    write(tmp_path, 1, 0, b"f\ntoday\n")
    write(tmp_path, 2, 0, b"new\n")
    assert sorted(following.poll()) == [(0, "f"), (0, "new"), (0, "today")]


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        (b"dos\r\n", "dos"),
        (b" 10%|#   |\r 50%|##  |\r100%|####|\n", "100%|####|"),
        (b"caf\xe9 \xf0\x9f\x99\x82\n", "caf� 🙂"),
    ],
)
def test_lines_are_shown_as_a_terminal_would_show_them(tmp_path: Path, written: bytes, shown: str) -> None:
    following = LogTails(tmp_path)
    for byte in written:
        write(tmp_path, 1, 0, bytes([byte]))
        given_now = following.poll()
    assert given_now == [(0, shown)]


def test_an_endless_progress_bar_does_not_fill_the_memory(tmp_path: Path) -> None:
    following = LogTails(tmp_path)
    path = write(tmp_path, 1, 0, b"")
    for _ in range(50):
        with open(path, "ab") as file:
            file.write(b"".join(b"\r%d%% of it" % n for n in range(1000)))
        assert following.poll() == []
    assert following.close() == [(0, "999% of it")]


def test_an_endless_line_is_returned_in_pieces(tmp_path: Path) -> None:
    following = LogTails(tmp_path)
    write(tmp_path, 1, 0, b"x" * (log_tail.LINE_BYTES * 3 + 5) + b"\n")
    pieces = [line for _ in range(3) for _, line in following.poll()]
    assert [len(piece) for piece in pieces] == [log_tail.LINE_BYTES] * 3 + [5]


def test_a_poll_is_bounded_and_no_rank_starves(tmp_path: Path) -> None:
    following = LogTails(tmp_path)
    line = b"y" * 1023 + b"\n"
    for rank in range(2):
        write(tmp_path, 1, rank, line * 3000)
    first = following.poll()
    assert len(first) <= log_tail.POLL_BYTES / 1024
    assert {rank for rank, _ in first} == {0, 1}
    rest = following.close()
    assert len(first) + len(rest) == 6000


def test_a_reader_far_behind_skips_lines_and_reports_how_many(tmp_path: Path) -> None:
    following = LogTails(tmp_path)
    path = write(tmp_path, 1, 0, b"")
    os.truncate(path, 100 << 20)
    write(tmp_path, 1, 0, b"\nnewest\n")
    lines = [line for _, line in following.close()]
    assert lines[0] == "[99 MiB not shown; the complete output is in logs/gen-0001/rank-0.log]"
    assert lines[-1] == "newest"


def test_foreign_names_and_vanished_files_are_ignored(tmp_path: Path) -> None:
    following = LogTails(tmp_path)
    path = write(tmp_path, 1, 0, b"here\n")
    (tmp_path / "gen-0001" / "rank-x.log").write_text("no\n")
    (tmp_path / "gen-0001" / "rank-1.log").mkdir()
    (tmp_path / "gen-one").mkdir()
    (tmp_path / "gen-0002").write_text("a file\n")
    assert following.poll() == [(0, "here")]
    path.unlink()
    assert following.poll() == []


def test_folders_of_old_generations_are_not_read_again(tmp_path: Path) -> None:
    following = LogTails(tmp_path)
    for generation in range(1, 8):
        folder = write(tmp_path, generation, 0, b"line\n").parent
        os.utime(folder, ns=(generation, generation))
        following.poll()
    old = tmp_path / "gen-0001" / "rank-0.log"
    with open(old, "ab") as file:
        file.write(b"nobody writes here any more\n")
    assert following.poll() == []
    write(tmp_path, 1, 1, b"but a new file is seen\n")
    assert following.poll() == [(0, "nobody writes here any more"), (1, "but a new file is seen")]


def test_the_newest_generation_is_followed_even_if_the_wall_clock_was_set_back(tmp_path: Path) -> None:
    following = LogTails(tmp_path)
    for generation in range(1, 6):
        folder = write(tmp_path, generation, 0, b"line\n").parent
        os.utime(folder, (1e9 - generation, 1e9 - generation))
    assert len(following.poll()) == 5
    with open(tmp_path / "gen-0005" / "rank-0.log", "ab") as file:
        file.write(b"and another\n")
    assert following.poll() == [(0, "and another")]


@given(
    st.binary(max_size=300).map(lambda raw: raw.replace(b"\r", b"")),
    st.lists(st.integers(0, 300), max_size=5),
)
def test_every_line_is_returned_once_and_in_order_however_writes_are_split(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, cuts: list[int]
) -> None:
    logs = tmp_path_factory.mktemp("logs")
    following = LogTails(logs)
    lines: list[str] = []
    edges = [0, *sorted(min(cut, len(content)) for cut in cuts), len(content)]
    for begin, end in pairwise(edges):
        write(logs, 1, 0, content[begin:end])
        lines += [line for _, line in following.poll()]
    lines += [line for _, line in following.close()]
    expected = content.decode(errors="replace").split("\n")
    assert lines == (expected if expected[-1] else expected[:-1])


def test_folders_are_listed_again_only_after_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_tail, "SETTLED_S", -1e9)
    listed: list[Path] = []
    names = log_tail._names

    def recorded(folder: Path) -> list[tuple[str, int]]:
        listed.append(folder)
        return names(folder)

    monkeypatch.setattr(log_tail, "_names", recorded)
    log = write(tmp_path, 1, 0, b"one\n")
    following = LogTails(tmp_path)
    assert following.poll() == [(0, "one")]
    listed.clear()
    write(tmp_path, 1, 0, b"two\n")
    assert following.poll() == [(0, "two")]
    assert listed == []
    os.utime(log.parent, ns=(1, 1))
    write(tmp_path, 1, 1, b"three\n")
    assert following.poll() == [(1, "three")]
    assert listed == [log.parent]
    monkeypatch.setattr(log_tail, "RELIST_S", 0.0)
    following.poll()
    assert listed == [log.parent, tmp_path, log.parent]


def test_a_folder_that_has_just_changed_is_listed_again(tmp_path: Path) -> None:
    """A file system may give two changes the same time."""
    log = write(tmp_path, 1, 0, b"one\n")
    following = LogTails(tmp_path)
    following.poll()
    times = log.parent.stat()
    write(tmp_path, 1, 1, b"two\n")
    os.utime(log.parent, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert following.poll() == [(1, "two")]

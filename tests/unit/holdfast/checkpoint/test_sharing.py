from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast.checkpoint import sharing
from holdfast.checkpoint.directory import DirectoryStorage
from holdfast.checkpoint.manifest import REPLICATED
from holdfast.checkpoint.sharing import SharedFile, SharedPiece, ShareRefused, StagingPlace
from holdfast.checkpoint.writer import write
from holdfast.fileio.checksum import file_crcs
from tests.samples.checkpoints import names, newest_whole

PIECE = 4096
PIECES = 1000


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.write_bytes(random.Random(1).randbytes(PIECE * PIECES - 100))
    return path


class Target:
    """Counts who writes which piece."""

    def __init__(self, source: Path, moved: Callable[[], object] = lambda: None) -> None:
        self.work = SharedFile(source, PIECE, moved)
        self.content = bytearray(self.work.size)
        self.source = source.read_bytes()
        self.count = 0

    def put(self, piece: SharedPiece) -> tuple[int, ...]:
        self.content[piece.begin : piece.end] = self.source[piece.begin : piece.end]
        self.count += 1
        return self.work.checksums(piece)


def expected(source: Path) -> tuple[int, ...]:
    with open(source, "rb") as file:
        return file_crcs(file.fileno(), source.stat().st_size, PIECE)


def test_a_thousand_pieces_are_divided_among_those_that_are_free(source: Path) -> None:
    moved: list[int] = []
    target = Target(source, lambda: moved.append(1))
    shares = [0, 0, 0]

    def help_out(number: int) -> None:
        while (piece := target.work.take()) is not None:
            if number == 2:
                target.work.give_back(piece)  # a peer that never succeeds
                time.sleep(0.001)
                continue
            target.work.finish(piece, target.put(piece))
            target.work.give_back(piece)  # without effect
            shares[number] += 1

    def own(piece: SharedPiece) -> tuple[int, ...]:
        time.sleep(0.0005)
        return target.put(piece)

    peers = [threading.Thread(target=help_out, args=(number,)) for number in range(3)]
    for each in peers:
        each.start()
    target.work.write_rest(own, 2)
    for each in peers:
        each.join()
    assert bytes(target.content) == target.source
    assert target.work.entry("f").crc32 == expected(source)
    assert target.count == PIECES
    assert len(moved) == sum(shares) > 0
    assert target.work.take() is None


@pytest.mark.parametrize("threads", [1, 3])
def test_pieces_that_peers_never_finish_are_written_once_by_the_writer(
    source: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    monkeypatch.setattr(sharing, "LATE_S", 0.05)
    target = Target(source)
    taken = [target.work.take() for _ in range(20)]
    target.work.write_rest(target.put, threads)
    assert bytes(target.content) == target.source
    assert target.count == PIECES
    for piece in taken:  # the answers come too late
        assert piece is not None
        target.work.finish(piece, (0,))
    assert target.work.entry("f").crc32 == expected(source)


def test_a_peer_that_is_only_a_little_late_is_waited_for(source: Path) -> None:
    target = Target(source)
    piece = target.work.take()
    assert piece is not None

    def finish() -> None:
        time.sleep(0.3)
        target.work.finish(piece, target.put(piece))

    late = threading.Thread(target=finish)
    late.start()
    target.work.write_rest(target.put, 2)
    late.join()
    assert target.count == PIECES


def test_an_error_of_the_writer_ends_all(source: Path) -> None:
    target = Target(source)
    held = target.work.take()

    def fail(piece: SharedPiece) -> tuple[int, ...]:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        target.work.write_rest(fail, 3)
    assert target.work.take() is None
    assert held is not None
    target.work.give_back(held)
    assert target.work.take() is None


def test_an_empty_file_has_no_pieces(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    work = SharedFile(tmp_path / "empty", PIECE, lambda: None)
    assert work.take() is None
    work.write_rest(lambda piece: (1,), 2)
    assert work.entry("f").crc32 == ()


class Helpers:
    """Calls `act` as a peer would, before the writer writes anything."""

    def __init__(self, act: Callable[[StagingPlace, SharedFile], None]) -> None:
        self.act = act

    def distrust(self, why: str) -> None:
        raise AssertionError(why)

    @contextmanager
    def helping(self, place: StagingPlace, work: SharedFile) -> Iterator[None]:
        self.act(place, work)
        yield


def test_after_the_writer_has_its_last_piece_no_request_is_accepted(source: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    storage = DirectoryStorage(root)
    places: list[StagingPlace] = []

    def request(place: StagingPlace) -> None:
        size = source.stat().st_size
        piece, content = SharedPiece(0, size), bytearray(source.read_bytes())
        storage.write_piece(name, place, size, piece, lambda begin, end: memoryview(content)[begin:end])

    def act(place: StagingPlace, work: SharedFile) -> None:
        places.append(place)
        request(place)

    name = "step-00000007"
    path = write(
        root,
        generation=1,
        step=7,
        world_size=1,
        files={REPLICATED: source, "rank-00000.bin": b"own"},
        meta={},
        created_at=0.0,
        helpers=Helpers(act),
    )
    assert path.name == name
    assert names(path) == {REPLICATED, "rank-00000.bin", "manifest.json"}
    with pytest.raises(ShareRefused, match="does not see"):
        request(places[0])
    found, _ = newest_whole(root)
    assert found is not None
    assert (path / REPLICATED).read_bytes() == source.read_bytes()

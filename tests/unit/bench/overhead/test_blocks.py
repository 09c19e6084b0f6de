from __future__ import annotations

import threading
from pathlib import Path

import pytest

from bench.overhead.blocks import VARIABLE, Blocks, Board, side_of, turn_of

RANKS = 2


@pytest.fixture
def board(tmp_path: Path) -> Board:
    return Board.create(tmp_path / "board", RANKS)


def test_the_sides_alternate_so_that_a_drift_hits_both() -> None:
    assert [side_of(turn) for turn in range(8)] == [0, 1, 1, 0, 0, 1, 1, 0]


def test_each_block_is_trained_in_a_turn_of_its_side() -> None:
    turns = [turn_of(side, block) for block in range(6) for side in (0, 1)]
    assert sorted(turns) == list(range(12))
    assert all(side_of(turn_of(side, block)) == side for block in range(6) for side in (0, 1))


def test_a_turn_ends_once_all_ranks_of_its_side_have_reported_its_end(board: Board) -> None:
    board.finished(0, 0, 1)
    assert board.turn() == 0
    board.finished(0, 1, 1)
    assert board.turn() == 1
    for rank in range(RANKS):
        board.finished(1, rank, 2)
    assert board.turn() == 3


def test_a_training_goes_through_its_blocks_in_order(board: Board, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []

    def train(side: int, rank: int) -> None:
        mine = Blocks(Board(tmp_path / "board", RANKS), side, rank, steps=3)
        for step in range(12):
            if mine.begins(step):
                mine.wait(step)
                seen.append((side, step // 3))
        mine.end(12)

    threads = [threading.Thread(target=train, args=(side, rank)) for side in (0, 1) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [turn_of(side, block) for side, block in seen] == [at // RANKS for at in range(16)]
    assert board.turn() == 8


def test_the_environment_describes_the_turns(
    board: Board, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert Blocks.given(0) is None
    monkeypatch.setenv(VARIABLE, f"{tmp_path / 'board'}:1:24:{RANKS}")
    found = Blocks.given(1)
    assert found is not None
    assert found.steps == 24
    found.end(24)
    assert (board.blocks(0), board.blocks(1)) == (0, 0), "the other rank has not agreed yet"

"""Let two training runs on the same cores take turns, one block of steps each: A B B A A B B A ...

Disturbances of the machine (other tenants, clock frequencies) last longer than a block, so they affect both
sides of a pair. All ranks keep their counts in one mapped file, and sleep until it is their turn. Uses only
the standard library, because it runs in ranks.
"""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

VARIABLE = "HOLDFAST_BENCH_BLOCKS"  # gives the ranks FILE:SIDE:STEPS:RANKS, see `Blocks.given`
POLL_S = 0.01  # polling at this interval costs the other side nothing measurable
_ORDER = (0, 1, 1, 0)


def side_of(turn: int) -> int:
    """Return the side that trains in this turn, 0 or 1."""
    return _ORDER[turn % len(_ORDER)]


def turn_of(side: int, block: int) -> int:
    """Return which turn is for block number `block` of `side`; both are counted from 0."""
    own = [at for at, each in enumerate(_ORDER) if each == side]
    return block // len(own) * len(_ORDER) + own[block % len(own)]


class Board:
    """The number of blocks that each rank of each side has finished, in a shared mapping of a file."""

    def __init__(self, path: Path, ranks: int) -> None:
        self._ranks = ranks
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self._counts = memoryview(self._map).cast("q")

    @staticmethod
    def create(path: Path, ranks: int) -> Board:
        path.write_bytes(bytes(2 * ranks * 8))
        return Board(path, ranks)

    def finished(self, side: int, rank: int, blocks: int) -> None:
        self._counts[side * self._ranks + rank] = blocks

    def blocks(self, side: int) -> int:
        """Return the number of blocks that all ranks of a side have finished."""
        return min(self._counts[side * self._ranks : (side + 1) * self._ranks])

    def turn(self) -> int:
        """Return the first turn that is not finished."""
        turn, done = 0, [0, 0]
        while done[side_of(turn)] < self.blocks(side_of(turn)):
            done[side_of(turn)] += 1
            turn += 1
        return turn


class Blocks:
    """Makes one rank wait until it is its side's turn to train."""

    def __init__(self, board: Board, side: int, rank: int, steps: int) -> None:
        self._board, self._side, self._rank = board, side, rank
        self.steps = steps

    @staticmethod
    def given(rank: int) -> Blocks | None:
        """Return the blocks that the environment variable describes; None if the run takes no turns.

        The variable contains the board's file, the side, the steps per block and the ranks per side.
        """
        value = os.environ.get(VARIABLE)
        if not value:
            return None
        path, side, steps, ranks = value.rsplit(":", 3)
        return Blocks(Board(Path(path), int(ranks)), int(side), rank, int(steps))

    def begins(self, step: int) -> bool:
        """Return True if a block begins with this step. The caller must then call `wait` before the step."""
        return step % self.steps == 0

    def wait(self, step: int) -> None:
        """Report the blocks before `step` as finished, and return when it is this side's turn again."""
        block = step // self.steps
        self._board.finished(self._side, self._rank, block)
        mine = turn_of(self._side, block)
        while self._board.turn() < mine:
            time.sleep(POLL_S)

    def end(self, step: int) -> None:
        """Report all blocks as finished after `step` steps, including a last one with fewer steps."""
        self._board.finished(self._side, self._rank, -(-step // self.steps))

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from holdfast.launcher import output_forwarder
from holdfast.launcher.output_forwarder import KEPT_BYTES, OutputForwarder, forwarder_of


class Reader:
    """Reads the forwarder's output, as a pod's log collector does."""

    def __init__(self) -> None:
        self.source, self.target = os.pipe()
        self.received = bytearray()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        while data := os.read(self.source, 1 << 16):
            self.received += data
        os.close(self.source)

    def finish(self) -> str:
        os.close(self.target)
        self._thread.join()
        return self.received.decode()


def log_of(folder: Path, generation: int, rank: int) -> Path:
    path = folder / f"gen-{generation:04d}" / f"rank-{rank}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def test_each_line_is_copied_once_across_generations_including_an_incomplete_last_one(tmp_path: Path) -> None:
    log_of(tmp_path, 1, 0).write_text("printed by an earlier launcher\n")
    reader = Reader()
    forwarder = OutputForwarder(tmp_path, several=False, target=reader.target)
    forwarder.start()
    log_of(tmp_path, 2, 0).write_text("step 1\nstep 2\n")
    log_of(tmp_path, 3, 0).write_text("step 3\nno newline")
    forwarder.close(30.0)
    assert reader.finish() == "step 1\nstep 2\nstep 3\nno newline\n"


def test_with_several_ranks_each_line_is_prefixed_with_its_rank(tmp_path: Path) -> None:
    reader = Reader()
    forwarder = OutputForwarder(tmp_path, several=True, target=reader.target)
    forwarder.start()
    for rank in range(2):
        log_of(tmp_path, 1, rank).write_text("ready\n")
    forwarder.close(30.0)
    assert sorted(reader.finish().splitlines()) == ["[rank 0] ready", "[rank 1] ready"]


def test_the_memory_of_copied_output_is_freed_except_for_its_end(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_forwarder, "POLL_S", 0.01)
    reader, log = Reader(), log_of(memory, 1, 0)
    forwarder = OutputForwarder(memory, several=False, target=reader.target)
    with log.open("w") as file:
        for number in range(8):
            file.write(f"{number} " + "x" * (1 << 20) + "\n")
    freed = threading.Event()
    free = forwarder._free

    def looked() -> None:
        free()
        if log.stat().st_blocks * 512 < 3 << 20:
            freed.set()

    monkeypatch.setattr(forwarder, "_free", looked)
    forwarder.start()
    assert freed.wait(60.0), f"{log.stat().st_blocks * 512} bytes are still in memory"
    forwarder.close(30.0)
    assert log.stat().st_size > 8 << 20, "the file size must not change, because writers append"
    assert log.read_bytes()[-KEPT_BYTES:].strip(b"\0x\n") == b""
    assert len(reader.finish()) > 8 << 20


def test_an_output_without_a_reader_costs_only_the_output(tmp_path: Path) -> None:
    source, target = os.pipe()
    os.close(source)
    forwarder = OutputForwarder(tmp_path, several=False, target=target)
    forwarder.start()
    log_of(tmp_path, 1, 0).write_text("lost\n")
    forwarder.close(30.0)
    os.close(target)
    assert not forwarder._thread.is_alive()


def test_a_local_run_forwards_nothing_because_its_keeper_shows_the_logs(tmp_path: Path) -> None:
    assert forwarder_of(tmp_path, 1, parent=os.getpid()) is None

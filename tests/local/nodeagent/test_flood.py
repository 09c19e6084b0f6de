"""100,000 lines, as fast as they can be read. The log is a list, because no socket could hold so many."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.nodeagent.kernel.world import IMPORTANT, NOTHING, Script, events, sensor

pytestmark = [pytest.mark.local, pytest.mark.timeout(60)]

NOISE = [NOTHING, "NVRM: Xid (garbage)", "nfs: server x maybe", "audit: type=1400 " + "x" * 200]
FLOOD = 100_000


def flood() -> Iterator[bytes]:
    every = FLOOD // len(IMPORTANT)
    for n in range(FLOOD):
        text = IMPORTANT[n // every] if n % every == every // 2 else NOISE[n % 4]
        yield b"4,%d,%d,-;%s\n" % (n, n * 10, text.encode())


def memory_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_in_a_flood_no_important_line_is_missed_and_memory_stays_bounded() -> None:
    script = Script(flood())
    reader, found, before = sensor(script), [], memory_bytes()
    while script.left:
        found += events(reader.read())
    assert [each.text for each in found] == IMPORTANT
    assert memory_bytes() - before < 4 << 20
    assert reader.lost == 0

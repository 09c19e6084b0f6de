from __future__ import annotations

import ctypes

from nodeagent.host import wall_clock


def test_the_kernels_status_bit_decides() -> None:
    assert wall_clock.sync_state(0x0040) == wall_clock.UNSYNCHRONISED
    assert wall_clock.sync_state(0x2041) == wall_clock.UNSYNCHRONISED
    assert wall_clock.sync_state(0x2001) == wall_clock.SYNCHRONISED
    assert "rtcsync" in wall_clock.describe_status(0x0040)
    assert wall_clock.describe_status(0x2001) == "adjtimex status 0x2001"


def test_the_structure_has_the_kernels_layout_and_size() -> None:
    assert wall_clock._Timex.status.offset == 40  # asm-generic, 64 bit
    assert ctypes.sizeof(wall_clock._Timex) >= 208


def test_the_kernels_status_can_be_read() -> None:
    assert wall_clock.sync_state(wall_clock.adjtimex_status()) in (0.0, 1.0)

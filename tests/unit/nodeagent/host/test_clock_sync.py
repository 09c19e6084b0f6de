from __future__ import annotations

import ctypes

from nodeagent.host import clock_sync


def test_the_bit_of_the_kernel_tells() -> None:
    assert clock_sync.state(0x0040) == clock_sync.UNSYNCHRONISED
    assert clock_sync.state(0x2041) == clock_sync.UNSYNCHRONISED
    assert clock_sync.state(0x2001) == clock_sync.SYNCHRONISED
    assert "rtcsync" in clock_sync.words(0x0040)
    assert clock_sync.words(0x2001) == "adjtimex status 0x2001"


def test_the_structure_has_the_kernels_layout_and_room_for_all_of_it() -> None:
    assert clock_sync._Timex.status.offset == 40  # asm-generic, 64 bit
    assert ctypes.sizeof(clock_sync._Timex) >= 208


def test_the_kernel_can_be_asked() -> None:
    assert clock_sync.state(clock_sync.status()) in (0.0, 1.0)

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from nodeagent.host import filesystems

COUNT = st.integers(0, 2**64)


def test_space_reserved_for_root_is_neither_used_nor_free() -> None:
    assert filesystems.disk_used(blocks=100, free=10, available=5) == 100 * 90 / 95
    assert filesystems.disk_used(blocks=100, free=5, available=0) == 100.0


def test_a_file_system_without_a_size_or_without_inodes_has_no_value() -> None:
    assert filesystems.disk_used(0, 0, 0) is None
    assert filesystems.inodes_used(0, 0) is None
    assert filesystems.inodes_used(100, 25) == 75.0


@example(483_104_898_305_951, 0, 0)  # rounding would give more than 100 percent
@given(COUNT, COUNT, COUNT)
def test_a_share_is_between_0_and_100_percent(total: int, free: int, available: int) -> None:
    for found in (filesystems.disk_used(total, free, available), filesystems.inodes_used(total, free)):
        assert found is None or 0.0 <= found <= 100.0

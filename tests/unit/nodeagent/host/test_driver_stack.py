from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.host.stuck_threads import in_driver

IN_UVM = b"""\
[<0>] rwsem_down_write_slowpath+0x2/0x5
[<0>] uvm_ioctl+0x1f/0x30 [nvidia_uvm]
[<0>] do_syscall_64+0x5b/0x80
"""
IN_STORAGE = b"[<0>] io_schedule+0x1/0x2\n[<0>] nvfs_ioctl+0x10/0x20 [nvidia_fs]\n"
IN_NFS = b"[<0>] rpc_wait_bit_killable+0x1/0x2 [sunrpc]\n"


def test_a_driver_module_in_the_stack_counts() -> None:
    assert in_driver(IN_UVM, "")
    assert not in_driver(IN_NFS, "")
    assert in_driver(b"[<0>] _nv039822rm+0x10/0x20 [nvidia]\n", "")


def test_a_thread_stuck_in_gpudirect_storage_waits_for_storage() -> None:
    assert not in_driver(IN_STORAGE, "")
    assert not in_driver(None, "nvidia_fs_wait")


@pytest.mark.parametrize(
    "symbol", ["nvidia_ioctl", "os_nvidia_wait", "nv_lock_api", "uvm_ioctl", "_nv039822rm"]
)
def test_without_a_stack_the_wait_channel_counts(symbol: str) -> None:
    assert in_driver(None, symbol)


@pytest.mark.parametrize("symbol", ["", "rpc_wait_bit_killable", "nvme_wait_freeze", "nvkm_wait", "ep_poll"])
def test_other_wait_channels_do_not_count(symbol: str) -> None:
    assert not in_driver(None, symbol)


def test_a_stack_takes_precedence_over_the_wait_channel() -> None:
    assert not in_driver(IN_NFS, "nvidia_ioctl")


@given(st.binary(max_size=100), st.text(max_size=30))
def test_no_stack_or_wait_channel_raises_an_exception(stack: bytes, wait_channel: str) -> None:
    assert in_driver(stack, wait_channel) in (True, False)

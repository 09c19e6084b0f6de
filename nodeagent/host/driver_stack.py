"""Whether a thread sleeps within the NVIDIA driver, by its kernel stack or its wait channel. Pure."""

from __future__ import annotations

import re

STACK_BYTES = 16384

# Not nvidia_fs: what hangs there is the storage.
_MODULE = re.compile(rb"\[nvidia(_uvm|_modeset|_drm|_peermem)?\]")
_SYMBOL = re.compile(r"nvidia(?!_?fs)|^_?nv_|^_nv\d|^uvm_")


def in_driver(stack: bytes | None, wait_channel: str) -> bool:
    """Say whether the driver is in the stack or, where no stack may be read, is what is waited in.

    A line of the stack is `[<0>] uvm_ioctl+0x1f/0x30 [nvidia_uvm]`: the module is what tells.
    """
    if stack:
        return _MODULE.search(stack) is not None
    return _SYMBOL.search(wait_channel) is not None

"""Whether anything disciplines the kernel's clock: adjtimex(2), which may be asked without privilege."""

from __future__ import annotations

import ctypes
import os

STA_UNSYNC = 0x0040  # linux/timex.h
SYNCHRONISED, UNSYNCHRONISED = 0.0, 1.0


class _Timex(ctypes.Structure):
    """The head of struct timex on 64-bit Linux, and room for the rest: all of it is 208 bytes."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_char * 256),
    )


def status() -> int:
    """Return the kernel's status bits. Raises OSError: a seccomp filter may refuse the call."""
    libc = ctypes.CDLL(None, use_errno=True)
    found = _Timex()  # modes 0: nothing is set
    if libc.adjtimex(ctypes.byref(found)) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(found.status)


def state(bits: int) -> float:
    """Return the check's state."""
    return UNSYNCHRONISED if bits & STA_UNSYNC else SYNCHRONISED


def words(bits: int) -> str:
    """Return what the bits say, for people."""
    hint = "; chrony clears STA_UNSYNC only with `rtcsync`" if bits & STA_UNSYNC else ""
    return f"adjtimex status 0x{bits & 0xFFFFFFFF:04x}{hint}"

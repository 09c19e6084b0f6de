"""Processes that a debugger holds. Once killed they are dead, but only the debugger can reap them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

_LIMIT_S = 30.0

# Permits every process to attach to it, which Yama may require.
SLEEPS = (
    sys.executable,
    "-c",
    "import ctypes, time; ctypes.CDLL(None).prctl(0x59616D61, ctypes.c_ulong(-1), 0, 0, 0);"
    "print('ready', flush=True); time.sleep(600)",
)
_HOLDS = """
import ctypes, sys, time
libc = ctypes.CDLL(None, use_errno=True)
print("no" if libc.ptrace(0x4206, int(sys.argv[1]), None, None) else "attached", flush=True)  # SEIZE
time.sleep(600)
"""


@contextmanager
def held(pid: int) -> Iterator[None]:
    """Attach to `pid` as a debugger that never reads its status."""
    words = [sys.executable, "-c", _HOLDS, str(pid)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as debugger:
        try:
            assert debugger.stdout is not None
            if debugger.stdout.readline().strip() != "attached":
                pytest.skip("nobody may attach to a process here")
            yield
        finally:
            debugger.kill()

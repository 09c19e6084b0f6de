"""A switch that makes the storage below one folder stop responding, for processes started with it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

_SOURCE = Path(__file__).with_name("stall.c")
_COMPILE_S = 60.0


class Storage:
    """Stalls the files below `root`, for processes with the variables of `environment`."""

    def __init__(self, root: Path, folder: Path) -> None:
        """Build the library in `folder`. Raises `RuntimeError` without a C compiler."""
        library, self._switch = folder / "stall.so", folder / "switch"
        self._switch.write_bytes(b"\0")
        _build(library)
        self.environment = {
            "LD_PRELOAD": str(library),
            "STALL_ROOT": str(root),
            "STALL_SWITCH": str(self._switch),
        }

    def stall(self) -> None:
        """Block every call from now on."""
        self._set(b"\1")

    def answer(self) -> None:
        """Let all calls return, blocked ones included."""
        self._set(b"\0")

    def _set(self, value: bytes) -> None:
        with self._switch.open("r+b") as file:  # in place, because processes have mapped it
            file.write(value)


def _build(library: Path) -> None:
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if not compiler:
        raise RuntimeError("stalling storage needs a C compiler: cc, gcc or clang, or one named by CC")
    command = [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-o", str(library), str(_SOURCE), "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_S, check=False)
    if done.returncode:
        raise RuntimeError(f"{compiler} failed on {_SOURCE.name}:\n{done.stderr}")

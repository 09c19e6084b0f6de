"""Compile the fake library, once for each version of its source."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = (HERE / "fakenvml.c", HERE / "fakenvml.h")
SONAME = "libnvidia-ml.so.1"
COMPILE_S = 60.0


class NoCompiler(Exception):
    """Raised if there is no C compiler, or if it cannot compile the source."""


def build(into: Path | None = None, old_driver: bool = False) -> Path:
    """Compile the library unless it exists; return its path. Its folder is for LD_LIBRARY_PATH.

    Args:
        into: The folder for it; by default one in the temporary folder, named after the source.
        old_driver: Leave out the functions that older drivers lack, so that their symbols are missing.

    Raises:
        NoCompiler: With the output of the compiler.
    """
    flags = ["-DFAKE_OLD_DRIVER"] if old_driver else []
    folder = into or _cached(flags)
    library = folder / SONAME
    if library.exists():
        return library
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if not compiler:
        raise NoCompiler("the fake NVML needs a C compiler: cc, gcc or clang, or one named by CC")
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f".{SONAME}.{os.getpid()}"  # two test runs may build at the same time
    command = [
        compiler, "-shared", "-fPIC", "-O1", "-Wall", f"-Wl,-soname,{SONAME}", *flags,
        "-o", str(draft), str(SOURCES[0]), "-lpthread",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_S, check=False)
    if done.returncode:
        raise NoCompiler(f"{compiler} failed on {SOURCES[0].name}:\n{done.stderr}")
    draft.replace(library)
    return library


def _cached(flags: list[str]) -> Path:
    digest = hashlib.sha256(" ".join(flags).encode())
    for source in SOURCES:
        digest.update(source.read_bytes())
    return Path(tempfile.gettempdir()) / f"fakenvml-{os.getuid()}-{digest.hexdigest()[:16]}"

"""Explain why the kernel refuses to start a file, before an attempt to start it or afterwards."""

from __future__ import annotations

import errno
import os
import platform
import shutil
import stat
from pathlib import Path

_HEAD_BYTES = 256  # how many bytes of a file Linux examines; the first line of a script must fit into them
_NESTED = 4  # Linux's limit on nested interpreters
_ELF = b"\x7fELF"
_FORMATS = Path("/proc/sys/fs/binfmt_misc")
_FOR_GOOD = frozenset(
    {
        errno.E2BIG,
        errno.EACCES,
        errno.EINVAL,
        errno.EISDIR,
        errno.ELIBBAD,
        errno.ELOOP,
        errno.ENAMETOOLONG,
        errno.ENOENT,
        errno.ENOEXEC,
        errno.ENOTDIR,
        errno.EPERM,
    }
)


class Unstartable(Exception):
    """The kernel refuses to start the command, and a retry would fail too. The message is one line."""


def refusal(name: str, path: Path, formats: Path = _FORMATS) -> str:
    """Return why the command `name`, found at `path`, certainly cannot be started; "" if it might start.

    The result is also "" if only the kernel can decide, because an emulator may run a program for another
    machine.
    """
    why = _wrong(path, _NESTED, _has_others(formats))
    return f"command {name!r} {why}" if why else ""


def explained(name: str, path: Path, error: OSError) -> str:
    """Return one line that says why the kernel refused to start the command `name`, found at `path`."""
    why = _wrong(path, _NESTED, False)
    if not why and error.errno == errno.ENOEXEC:
        why = f"is not a program for this machine ({platform.machine()}), or is damaged"
    if not why and error.errno == errno.ENOENT and _head(path).startswith(_ELF):
        why = "is a program whose loader (dynamic linker) is not on this machine"
    return f"command {name!r} {why or f'cannot be started: {error.strerror}'}"


def is_for_good(error: OSError) -> bool:
    """Return True if the kernel refused the program itself, False if the machine lacked resources for it."""
    return error.errno in _FOR_GOOD and error.filename is not None


def _wrong(path: Path, depth: int, others: bool) -> str:
    """Return what is wrong with a file; "" if nothing is.

    `others` is True if the kernel knows formats that this module does not.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a named pipe would wait for its other end
            return "is not a regular file: specify a program or a Python file (.py)"
    except OSError:
        return ""
    head = _head(path)
    if head.startswith(b"#!"):
        return _wrong_interpreter(path, head, depth, others)
    if head == b"" and _is_empty(path):
        return "is an empty file: specify a program or a Python file (.py)"
    if others or not _is_text(head):
        return ""
    return (
        "is a text file without an interpreter in its first line: begin it with `#!`, such as"
        f" `#!/bin/sh`, or specify its interpreter, such as `python {path}`"
    )


def _wrong_interpreter(path: Path, head: bytes, depth: int, others: bool) -> str:
    line = head[2:].partition(b"\n")[0].partition(b"\0")[0].strip(b" \t").replace(b"\t", b" ")
    name, _, argument = os.fsdecode(line).partition(" ")
    if not name:
        return "has no interpreter after the `#!` in its first line"
    ending = "; the line has a Windows line ending (CR LF)" if line.endswith(b"\r") else ""
    if not os.access(name, os.F_OK):
        return f"names the interpreter {name!r}, which does not exist{ending}"
    if Path(name).is_dir() or not os.access(name, os.X_OK):
        return f"names the interpreter {name!r}, which cannot be executed"
    wanted = argument.split(" ")[0]
    by_env = Path(name).name == "env" and wanted and not wanted.startswith("-") and "=" not in wanted
    if by_env and shutil.which(wanted) is None:
        return f"names the interpreter {wanted!r}, which is not on PATH{ending}"
    why = _wrong(Path(name), depth - 1, others) if depth else ""
    return f"names the interpreter {name!r}, which {why}" if why else ""


def _head(path: Path) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(_HEAD_BYTES)
    except OSError:  # the file may still be executable
        return b""


def _is_empty(path: Path) -> bool:
    try:
        return path.stat().st_size == 0
    except OSError:
        return False


def _is_text(head: bytes) -> bool:
    text = bool(head) and b"\0" not in head
    return text and all(byte >= 32 or byte in b"\t\n\r\f\v\x1b" for byte in head)


def _has_others(formats: Path) -> bool:
    """Return True if the kernel is configured for more formats (binfmt_misc)."""
    try:
        return any(each.name not in ("register", "status") for each in formats.iterdir())
    except OSError:
        return False

"""`holdfast install-runtime DIRECTORY`: installs the parts of Holdfast that a training container needs.

The init container `holdfast-setup` runs this command on a volume of the pod before the training starts.
Kubernetes may run an init container again, even after it succeeded. Each run therefore clears what an
unfinished run left behind, and then installs everything. To readers, `LIBRARY` and `PY_SPY` are each either
complete or absent.

The training container may run as another user and with another Python version. All users may therefore read
the files, and add bytecode for their version.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from holdfast import exit_codes

LIBRARY = Path("lib")  # contains only the package `holdfast`, because the training's Python imports from it
PY_SPY = Path("bin", "py-spy")

_STAGING = ".install"
_PARTS = "_parts"  # not installed: the parts run only in our own image
_BYTECODE = "__pycache__"
_DIRECTORY, _FILE, _PROGRAM = 0o755, 0o644, 0o755
_ANY_USER = 0o1777  # like /tmp: any user may add files, but may replace only their own
_MARGIN_BYTES = 1 << 20  # for directories and partly filled blocks
_USAGE = "usage: holdfast install-runtime DIRECTORY"


class NotInstalled(Exception):
    """The runtime could not be installed; the message is one line. A retry is safe."""


def main(argv: Sequence[str]) -> int:
    """Install into the directory given in `argv`. Return 0, 1 on failure, or 2 for a bad command line."""
    if argv in (["-h"], ["--help"]):
        sys.stdout.write(f"{_USAGE}\n\nCopy the package holdfast and py-spy into a training pod's volume.\n")
        return 0
    if len(argv) != 1 or argv[0].startswith("-"):
        sys.stderr.write(f"{_USAGE}\n")
        return exit_codes.BAD_INPUT
    try:
        install(Path(argv[0]))
    except NotInstalled as error:
        sys.stderr.write(f"holdfast install-runtime: {error}\n")
        return 1
    return 0


def install(directory: Path, package: Path | None = None, py_spy: Path | None = None) -> None:
    """Install the package `holdfast` and py-spy in `directory`, replacing earlier versions.

    The defaults are the package that contains this module, and the py-spy of this Python. On return, both are
    complete. If this raises, each of them is the earlier version, the new version, or absent. The umask has
    no effect.

    Raises:
        NotInstalled: The directory cannot be written, another process is installing into it, or py-spy is
            missing.
    """
    package = package or Path(__file__).resolve().parents[1]
    py_spy = py_spy or _find_py_spy()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _locked(directory):
            staging = directory / _STAGING
            _remove(staging)
            try:
                _fill(staging, package, py_spy)
                for name in (LIBRARY.parts[0], PY_SPY.parts[0]):
                    _replace(directory / name, staging)
            finally:
                _remove(staging)
    except OSError as error:
        raise NotInstalled(_explained(error, directory, package, py_spy)) from error


def _find_py_spy() -> Path:
    beside = Path(sys.executable).with_name(PY_SPY.name)
    found = str(beside) if beside.is_file() else shutil.which(PY_SPY.name)
    if found is None:
        raise NotInstalled(f"no py-spy next to {sys.executable} or on PATH: install Holdfast with pip")
    return Path(found)


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Lock `directory` against other installations. The kernel releases the lock if the process dies."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise NotInstalled(f"another process is installing into {directory}") from None
        yield
    finally:
        os.close(descriptor)


def _fill(staging: Path, package: Path, py_spy: Path) -> None:
    _make_directory(staging)
    _make_directory(staging / LIBRARY)
    _copy_package(package, staging / LIBRARY / "holdfast")
    _make_directory(staging / PY_SPY.parent)
    _copy_file(py_spy, staging / PY_SPY, _PROGRAM)


def _copy_package(source: Path, target: Path) -> None:
    """Copy a package and its bytecode. Create a bytecode directory even where the source has none."""
    _make_directory(target)
    _make_directory(target / _BYTECODE, _ANY_USER)
    for entry in sorted(source.iterdir()):
        if entry.name == _BYTECODE:
            for compiled in sorted(entry.glob("*.pyc")):
                _copy_file(compiled, target / _BYTECODE / compiled.name)
        elif entry.is_file():
            _copy_file(entry, target / entry.name)
        elif entry.is_dir() and entry.name != _PARTS:
            _copy_package(entry, target / entry.name)


def _make_directory(path: Path, mode: int = _DIRECTORY) -> None:
    path.mkdir()
    path.chmod(mode)


def _copy_file(source: Path, target: Path, mode: int = _FILE) -> None:
    """Copy a file with its modification time, which shows whether the bytecode belongs to the source file."""
    shutil.copyfile(source, target)
    status = source.stat()
    os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))
    target.chmod(mode)


def _replace(target: Path, staging: Path) -> None:
    """Move the directory `target.name` from `staging` to `target`, and the old `target` into `staging`."""
    if target.exists():
        target.rename(staging / f"old-{target.name}")
    (staging / target.name).rename(target)


def _remove(staging: Path) -> None:
    if staging.exists():
        shutil.rmtree(staging)


def _explained(error: OSError, directory: Path, package: Path, py_spy: Path) -> str:
    """Return one line that says what went wrong and, if the operator can fix it, what to change."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        needed = _size_bytes(package, py_spy) + _MARGIN_BYTES
        return f"{directory} is full: its volume needs {needed / (1 << 20):.0f} MiB"
    if error.errno == errno.EROFS:
        return f"{directory} is read-only: its volume must be mounted for writing"
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"user {os.geteuid()} may not write to {error.filename or directory}"
    where = f"{error.filename}: " if error.filename else ""
    return f"cannot install into {directory}: {where}{error.strerror or error}"


def _size_bytes(package: Path, py_spy: Path) -> int:
    files = [path for path in package.rglob("*") if _PARTS not in path.relative_to(package).parts]
    return sum(path.stat().st_size for path in (*files, py_spy) if path.is_file())

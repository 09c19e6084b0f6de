"""`holdfast install-runtime` writes a whole package to a volume, usable by any user, at every run."""

from __future__ import annotations

import errno
import fcntl
import os
import py_compile
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.launcher.runtime_install import LIBRARY, PY_SPY, NotInstalled, install, main
from tests.sandbox import in_child

SETUP_USER, OTHER_USER = 65532, 1234
BYTECODE = "__pycache__"


@pytest.fixture
def volume(memory: Path) -> Path:
    """Return an empty directory like the kubelet's emptyDir: owned by root, writable by all."""
    memory.chmod(0o755)
    made = memory / "volume"
    made.mkdir()
    made.chmod(0o777)
    return made


@pytest.fixture
def package(memory: Path) -> Path:
    """Return a small package with bytecode, a data file, a subpackage, and parts."""
    made = memory / "holdfast"
    for folder in (made, made / "inner", made / "_parts" / "supervisor"):
        folder.mkdir(parents=True)
        py_compile.compile(str(_write(folder / "__init__.py", "VALUE = 1\n")))
    _write(made / "py.typed", "")
    return made


@pytest.fixture
def py_spy(memory: Path) -> Path:
    return _write(memory / "py-spy", "#!/bin/sh\necho stacks\n")


def _write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def listing(folder: Path) -> dict[str, int]:
    """Return the mode of every file and directory below `folder`, by path."""
    return {
        str(path.relative_to(folder)): stat.S_IMODE(path.stat().st_mode) for path in sorted(folder.rglob("*"))
    }


def become(user: int) -> None:
    """Run the rest of this process as `user` if it has the right to."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)


def failing_at(number: int, error: OSError) -> Callable[[Path, Path], object]:
    """Return a `copyfile` that copies half of the file and raises at its call `number`."""
    calls = iter(range(number + 1))
    copy = shutil.copyfile

    def copyfile(source: Path, target: Path) -> object:
        if next(calls) < number:
            return copy(source, target)
        content = source.read_bytes()
        target.write_bytes(content[: len(content) // 2])
        raise error

    return copyfile


def test_the_installed_package_needs_only_the_standard_library(volume: Path) -> None:
    install(volume)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from holdfast.launcher import cli; print(cli.__file__)"
    )
    command = [sys.executable, "-I", "-S", "-c", code, str(volume / LIBRARY)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True)
    assert Path(printed.stdout.strip()) == volume / LIBRARY / "holdfast/launcher/cli.py"
    assert os.access(volume / PY_SPY, os.X_OK)
    assert {path.name for path in volume.iterdir()} == {LIBRARY.parts[0], PY_SPY.parts[0]}
    assert [path.name for path in (volume / LIBRARY).iterdir()] == ["holdfast"]


def test_everything_but_the_parts_is_installed_with_modes_for_any_user(
    volume: Path, package: Path, py_spy: Path
) -> None:
    before = os.umask(0o077)
    try:
        install(volume, package, py_spy)
    finally:
        os.umask(before)
    compiled = f"__init__.{sys.implementation.cache_tag}.pyc"
    assert listing(volume) == {
        "bin": 0o755,
        "bin/py-spy": 0o755,
        "lib": 0o755,
        "lib/holdfast": 0o755,
        "lib/holdfast/__init__.py": 0o644,
        f"lib/holdfast/{BYTECODE}": 0o1777,
        f"lib/holdfast/{BYTECODE}/{compiled}": 0o644,
        "lib/holdfast/inner": 0o755,
        "lib/holdfast/inner/__init__.py": 0o644,
        f"lib/holdfast/inner/{BYTECODE}": 0o1777,
        f"lib/holdfast/inner/{BYTECODE}/{compiled}": 0o644,
        "lib/holdfast/py.typed": 0o644,
    }


def test_the_bytecode_belongs_to_the_installed_sources(volume: Path, package: Path, py_spy: Path) -> None:
    install(volume, package, py_spy)
    code = "import sys; sys.path.insert(0, sys.argv[1]); import holdfast.inner"
    command = [sys.executable, "-I", "-S", "-v", "-c", code, str(volume / LIBRARY)]
    read = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    for folder in ("holdfast", "holdfast/inner"):
        compiled = volume / LIBRARY / folder / BYTECODE / f"__init__.{sys.implementation.cache_tag}.pyc"
        assert f"# {compiled} matches {compiled.parents[1] / '__init__.py'}" in read


def test_one_user_installs_and_another_adds_bytecode(volume: Path, package: Path, py_spy: Path) -> None:
    shutil.rmtree(package / BYTECODE)

    def set_up() -> None:
        become(SETUP_USER)
        install(volume, package, py_spy)

    def train() -> None:
        become(OTHER_USER)
        subprocess.run([volume / PY_SPY], check=True, stdout=subprocess.DEVNULL)
        py_compile.compile(str(volume / LIBRARY / "holdfast" / "__init__.py"), doraise=True)

    assert in_child(set_up) == 0
    assert in_child(train) == 0
    assert list((volume / LIBRARY / "holdfast" / BYTECODE).iterdir()) != []
    assert in_child(set_up) == 0, "the setup must also replace another user's files"


def test_a_second_run_leaves_the_same_files_as_the_first(volume: Path, package: Path, py_spy: Path) -> None:
    install(volume, package, py_spy)
    first = listing(volume)
    _write(volume / LIBRARY / "holdfast" / "gone.py", "")
    _write(volume / LIBRARY / "holdfast" / BYTECODE / "__init__.cpython-399.pyc", "")
    (volume / PY_SPY).write_text("damaged")
    install(volume, package, py_spy)
    assert listing(volume) == first
    assert (volume / PY_SPY).read_bytes() == py_spy.read_bytes()


@pytest.mark.parametrize("number", range(6))
def test_a_failed_run_leaves_the_earlier_installation_whole(
    number: int, volume: Path, package: Path, py_spy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(volume, package, py_spy)
    first = listing(volume)
    _write(package / "new.py", "")
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(shutil, "copyfile", failing_at(number, full))
    with pytest.raises(NotInstalled):
        install(volume, package, py_spy)
    assert listing(volume) == first


@pytest.mark.parametrize("number", range(5))
def test_remains_of_a_killed_run_are_removed(
    number: int, volume: Path, package: Path, py_spy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed() -> None:
        monkeypatch.setattr(shutil, "rmtree", lambda _: os._exit(0))  # reached once the copy has failed
        monkeypatch.setattr(shutil, "copyfile", failing_at(number, OSError()))
        install(volume, package, py_spy)

    assert in_child(killed) == 0
    assert [path.name for path in volume.iterdir()] not in ([], ["lib"], ["bin"])
    install(volume, package, py_spy)
    assert {path.name for path in volume.iterdir()} == {"lib", "bin"}


def test_two_runs_at_once_are_refused(volume: Path, package: Path, py_spy: Path) -> None:
    other = os.open(volume, os.O_RDONLY)
    try:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(NotInstalled, match="another process is installing into"):
            install(volume, package, py_spy)
    finally:
        os.close(other)
    install(volume, package, py_spy)


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (errno.ENOSPC, "{volume} is full: its volume needs 1 MiB"),
        (errno.EDQUOT, "{volume} is full: its volume needs 1 MiB"),
        (errno.EROFS, "{volume} is read-only: its volume must be mounted for writing"),
        (errno.EIO, "cannot install into {volume}: Input/output error"),
    ],
)
def test_a_failure_is_one_line_that_states_what_to_change(
    number: int, message: str, volume: Path, package: Path, py_spy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "copyfile", failing_at(2, OSError(number, os.strerror(number))))
    with pytest.raises(NotInstalled) as caught:
        install(volume, package, py_spy)
    assert str(caught.value) == message.format(volume=volume)


def test_the_error_names_the_user_who_may_not_write(volume: Path, capfd: pytest.CaptureFixture[str]) -> None:
    volume.chmod(0o555)

    def set_up() -> None:
        become(SETUP_USER)
        os._exit(main([str(volume)]))

    assert os.waitstatus_to_exitcode(in_child(set_up)) == 1
    user = SETUP_USER if os.geteuid() == 0 else os.geteuid()
    line = f"holdfast install-runtime: user {user} may not write to {volume / '.install'}\n"
    assert capfd.readouterr().err == line


def test_an_image_without_py_spy_is_refused(volume: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(NotInstalled, match="no py-spy next to /nowhere/python"):
        install(volume)


@pytest.mark.parametrize("argv", [[], ["--force", "/x"], ["-x"], ["/x", "/y"]])
def test_a_bad_command_line_is_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    assert capsys.readouterr().err == "usage: holdfast install-runtime DIRECTORY\n"


def test_help_is_printed_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: holdfast install-runtime DIRECTORY\n")

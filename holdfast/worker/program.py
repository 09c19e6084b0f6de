"""Parse the user's command: the interpreter, the script or module, and whether it imports holdfast."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from holdfast.errors import BadInput
from holdfast.launch_commands import (
    ACCELERATE_LAUNCH,
    ACCELERATE_MODULE,
    ACCELERATE_PROGRAM,
    LAUNCHER_MODULES,
    LAUNCHER_PROGRAMS,
)
from holdfast.process import executable

_PYTHON = re.compile(r"python(3(\.\d+)?)?(\.exe)?")
_TAKES_VALUE = {"-W", "-X"}
_LAUNCHERS = {**LAUNCHER_MODULES, **LAUNCHER_PROGRAMS}
_INFORMATION_ONLY = {
    "-V",
    "-VV",
    "--version",
    "-h",
    "-?",
    "--help",
    "--help-env",
    "--help-xoptions",
    "--help-all",
}
MAX_SOURCE_BYTES = 4 << 20
_COMPILE = """
import sys, traceback
try:
    compile(open(sys.argv[1], "rb").read(), sys.argv[1], "exec")
except (SyntaxError, ValueError) as error:
    sys.exit("".join(traceback.format_exception_only(type(error), error)))
"""
_NOT_FOUND, _FIND_S = 91, 30.0
_FIND = f"""
import importlib.util, sys
sys.exit({_NOT_FOUND} if importlib.util.find_spec(sys.argv[1]) is None else 0)
"""
_MAX_FILES = 200  # at most this many local modules are searched for `import holdfast`
# Whether holdfast is imported, which other modules are imported from outside the script's folder, and the
# files of the local modules.
_ImportScan = tuple[bool, tuple[str, ...], tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Program:
    """A parsed command, with the information that warm processes need to run it.

    kind: "script" (`target` is a file), "module" (`-m target`), or "other" (not a Python script or module, so
    `argv` is started unchanged).
    """

    kind: str
    interpreter: str
    flags: tuple[str, ...]
    target: str
    args: tuple[str, ...]
    argv: tuple[str, ...]
    joins: bool = False  # whether the script, or a local module that it imports, imports holdfast
    imports: tuple[str, ...] = ()  # the imported modules from outside the script's folder
    source: str = ""  # the file with the program's first line; "" if not known
    own: tuple[str, ...] = ()  # the files of the local modules that it imports, directly or indirectly

    def entered(self, code: str, root: Path) -> tuple[str, ...]:
        """Return the command that runs `code`, with the program's folder and `root`, in the interpreter."""
        folder = Path(self.target).resolve().parent if self.kind == "script" else Path().resolve()
        return (self.interpreter, *self.flags, "-c", code, str(folder), str(root))


def parse(argv: list[str], directory: Path) -> Program:
    """Parse the command `argv`, which is run in `directory`.

    Raises:
        BadInput: The command is empty or cannot be found, or its script does not exist.
    """
    if not argv:
        raise BadInput("no command: pass one after --, such as `-- python train.py`")
    found = shutil.which(argv[0])
    if found is None:
        raise BadInput(_not_a_command(argv[0], directory))
    if not _PYTHON.fullmatch(Path(argv[0]).name):
        return Program("other", found, (), "", (), tuple(argv))
    flags, rest = _split_flags(argv[1:])
    if rest[:1] == ["-m"] and len(rest) > 1:
        return _module(found, flags, rest[1], rest[2:], argv, directory)
    if not rest or rest[0].startswith("-"):
        return Program("other", found, (), "", (), tuple(argv))
    return _script(found, flags, rest[0], rest[1:], argv, directory)


def launcher_refusal(argv: list[str]) -> str:
    """Return why `holdfast run` cannot supervise the command `argv`; "" if it can.

    A launcher such as torchrun would itself run as a rank, and `join` would not work in the ranks that it
    starts.
    """
    if not argv:
        return ""
    name, words = Path(argv[0]).name, argv[1:]
    if _PYTHON.fullmatch(name):
        flags, words = _split_flags(words)
        if not words and not _INFORMATION_ONLY.intersection(flags):
            return (
                f"{name!r} without a script would only read its input: add one, such as `-- {name} train.py`"
            )
        named = words[1:2] if words[:1] == ["-m"] else [Path(word).name for word in words[:1]]
        name, words = "".join(named), words[1 + (words[:1] == ["-m"]) :]
    launcher = _LAUNCHERS.get(name)
    if launcher is None and name in (ACCELERATE_PROGRAM, ACCELERATE_MODULE) and words[:1] == ["launch"]:
        launcher = ACCELERATE_LAUNCH
    if launcher is None:
        return ""
    return (
        f"holdfast run replaces {launcher}, so pass the script itself: holdfast run --nproc-per-node N"
        " -- python train.py"
    )


def _not_a_command(name: str, directory: Path) -> str:
    here = directory / name
    if here.is_dir():
        return f"command {name!r} is a directory: specify a program or a Python file (.py)"
    if here.is_file() and os.access(here, os.X_OK):
        return f"command {name!r} is not on PATH: to start the file in this directory, write `./{name}`"
    if here.is_file():
        return (
            f"command {name!r} is a file that cannot be executed: to run a Python script, write `python"
            f" {name}`"
        )
    return f"command {name!r} not found: specify a program on PATH or the path of a program"


def _split_flags(words: list[str]) -> tuple[list[str], list[str]]:
    flags: list[str] = []
    while words and words[0].startswith("-") and words[0] not in ("-m", "-c", "-"):
        count = 2 if words[0] in _TAKES_VALUE and len(words) > 1 else 1
        flags, words = flags + words[:count], words[count:]
    return flags, words


def _script(
    python: str, flags: list[str], name: str, args: list[str], argv: list[str], directory: Path
) -> Program:
    path = directory / name
    if not path.is_file():
        raise BadInput(f"script {name!r} not found in {directory}: specify a Python file that exists")
    real = path.resolve()  # like Python, resolve links before determining the script's folder
    joins, imports, own = _look_through(real, real.parent)
    return Program(
        "script", python, tuple(flags), name, tuple(args), tuple(argv), joins, imports, str(path), own
    )


def _module(
    python: str, flags: list[str], name: str, args: list[str], argv: list[str], directory: Path
) -> Program:
    relative = name.replace(".", "/")
    for candidate in (directory / relative / "__main__.py", directory / f"{relative}.py"):
        if candidate.is_file():
            joins, imports, own = _look_through(candidate, directory)
            source = str(candidate)
            break
    else:
        source, own = "", ()
        joins, imports, _ = _look_at_installed(name)
    return Program(
        "module", python, tuple(flags), name, tuple(args), tuple(argv), joins, imports, source, own
    )


def check_start(program: Program) -> str:
    """Return why the command's program certainly cannot be started; "" if it might start."""
    path = shutil.which(program.argv[0])
    return executable.refusal(program.argv[0], Path(path)) if path is not None else ""


def check_syntax(program: Program) -> str | None:
    """Return Python's error message if the program cannot be compiled; None if it can.

    If this interpreter cannot compile the program, the program's own interpreter decides, because it may have
    a newer version.
    """
    if not program.source:
        return None
    try:
        compile(Path(program.source).read_bytes(), program.source, "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, OSError):
        words = [program.interpreter, "-c", _COMPILE, program.source]
        try:
            done = subprocess.run(words, capture_output=True, text=True, check=False)
        except OSError:  # the interpreter cannot be started; the launcher will report why
            return None
        return done.stderr.strip() if done.returncode else None
    return None


def check_module(program: Program, directory: Path) -> str | None:
    """Return why `-m MODULE` cannot be found from `directory`; None if it might be found.

    This imports none of the user's modules. A package can extend its own path, so a submodule that seems to
    be missing may exist. Only a missing top-level package proves that the module does not exist.
    """
    if program.kind != "module" or program.source:
        return None
    top = program.target.partition(".")[0]
    words = [program.interpreter, *program.flags, "-c", _FIND, top]
    try:
        done = subprocess.run(words, capture_output=True, check=False, cwd=directory, timeout=_FIND_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != _NOT_FOUND:
        return None
    return f"module {program.target!r} not found: specify a module that can be imported from {directory}"


def _look_at_installed(name: str) -> _ImportScan:
    """Scan the imports of a module on this interpreter's path, without importing its parent packages."""
    top = name.partition(".")[0]
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.origin:
        return False, (), ()
    root = Path(spec.origin).parent
    relative = name.split(".")[1:]
    if spec.submodule_search_locations is None:
        return _look_through(Path(spec.origin), root)
    package = root.joinpath(*relative)
    for candidate in (package / "__main__.py", package.with_suffix(".py"), root / "__init__.py"):
        if candidate.is_file():
            return _look_through(candidate, root.parent)
    return False, (), ()


def _look_through(first: Path, root: Path) -> _ImportScan:
    """Follow the imports from `first` through the local modules in `root`; see `_ImportScan`.

    This only reads sources. A script that hides its import of holdfast (importlib, exec) is assumed not to
    join. This mistake affects speed but not correctness.
    """
    todo, seen, outside, own, joins = [first], {first.resolve()}, set[str](), list[str](), False
    while todo and len(seen) <= _MAX_FILES:
        path = todo.pop()
        for name in _imported(path, root):
            if name.partition(".")[0] == "holdfast":
                joins = True
                continue
            local = _local(name, root, path.parent)
            if not local and not _local(name.partition(".")[0], root, path.parent):
                outside.add(name)  # any other name is an attribute of a local module
            for each in local:
                if each.resolve() not in seen:
                    seen.add(each.resolve())
                    todo.append(each)
                    own.append(str(each))
    return joins, tuple(sorted(outside)), tuple(sorted(own[:_MAX_FILES]))


def _local(name: str, root: Path, beside: Path) -> list[Path]:
    relative = Path(*name.split("."))
    found: list[Path] = []
    for base in {root, beside}:
        places = ((base / relative).with_suffix(".py"), base / relative / "__init__.py")
        found += [each for each in places if each.is_file()]
    return found


def _imported(path: Path, root: Path) -> list[str]:
    try:
        if path.stat().st_size > MAX_SOURCE_BYTES:
            return []
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return []  # the run will report the error with a traceback
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names += [node.module, *(f"{node.module}.{a.name}" for a in node.names)]
        elif isinstance(node, ast.ImportFrom) and node.level:
            names += _relative(node, path, root)
    return names


def _relative(node: ast.ImportFrom, path: Path, root: Path) -> list[str]:
    folder = path.parent
    for _ in range(node.level - 1):
        folder = folder.parent
    try:
        parts = list(folder.resolve().relative_to(root.resolve()).parts)
    except ValueError:
        return []
    module = ".".join([*parts, *([node.module] if node.module else [])])
    return [name for name in (module, *(f"{module}.{a.name}" for a in node.names)) if name]

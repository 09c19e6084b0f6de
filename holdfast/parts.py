"""Locate and start the parts of Holdfast, and keep them out of the imports of a user's script.

Other packages may also be called `supervisor`, `sidecar` or `trainer`, so the parts are programs, not
libraries. Each part runs in its own process, whose import path begins with the parts' directory; no other
process has that directory on its path. This file is both a module and the script that these processes
execute. As a script, it must fix the import path before importing anything that depends on it.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

PARTS = ("supervisor", "sidecar", "nodeagent", "trainer")

# Packages that may be missing when a part starts: their import names, and the distributions to install.
DISTRIBUTIONS = {
    "aiohttp": "aiohttp",
    "prometheus_client": "prometheus_client",
    "psutil": "psutil",
    "pynvml": "nvidia-ml-py",
    "tomli": "tomli",
    "torch": "torch",
    "numpy": "numpy",
    "sklearn": "scikit-learn",
}

# Resolve the directory, not the file. This package may be imported through the link that `import_root`
# creates, and an installer may have linked each file separately to its cache.
_PACKAGE = os.path.realpath(os.path.dirname(__file__))
_SCRIPT = os.path.join(_PACKAGE, "parts.py")
_TEMPLATE = "--template"


def folder() -> Path:
    """Return the directory that contains the parts: `holdfast/_parts`, or the root of the checkout."""
    from pathlib import Path

    return Path(_folder())


def command(part: str, *args: str) -> list[str]:
    """Return the command line that starts a part (`sidecar`) or a module of a part (`trainer.gpt`)."""
    assert part.partition(".")[0] in PARTS, part
    return [sys.executable, _SCRIPT, part, *args]


def template_command(parent: int, control: int, *modules: str) -> list[str]:
    """Return the command line of a process that imports `modules` and then forks parts."""
    return [sys.executable, _SCRIPT, _TEMPLATE, str(parent), str(control), *modules]


def import_root(directory: Path) -> Path:
    """Create `directory` with only a link to this package in it, and return its absolute path.

    With this directory on PYTHONPATH, a script can import this copy of `holdfast` but nothing else that is
    installed next to it. It is safe to repeat the call, even from several processes at once. Raises OSError
    if the directory or the link cannot be created.
    """
    directory.mkdir(parents=True, exist_ok=True)
    link = directory / "holdfast"
    try:
        link.symlink_to(_PACKAGE, target_is_directory=True)
    except FileExistsError:
        if not link.is_symlink() or os.readlink(link) != _PACKAGE:
            spare = directory / f".holdfast-{os.urandom(8).hex()}"
            spare.symlink_to(_PACKAGE, target_is_directory=True)
            os.replace(spare, link)
    return directory.absolute()


def with_path(environment: Mapping[str, str], root: Path) -> str:
    """Return the PYTHONPATH of `environment` with `root` appended."""
    known = environment.get("PYTHONPATH", "")
    return f"{known}{os.pathsep}{root}" if known else str(root)


def _folder() -> str:
    inside = os.path.join(_PACKAGE, "_parts")
    return inside if os.path.isdir(inside) else os.path.dirname(_PACKAGE)


def _become(part: str, args: list[str]) -> int:
    """Find and run `part`. A template instead forks a process for each requested part and runs it there."""
    if part == _TEMPLATE:
        _set_path()
        from holdfast.process import fork_server

        words = fork_server.serve(args)
        return run(words[0], words[1:]) if words else 0
    problem = _missing(part)
    if problem:
        _refuse(problem)
        # `holdfast node check` returns 64 for any bad input, because 2 is its verdict "unhealthy".
        return 64 if (part, args[:1]) == ("nodeagent", ["check"]) else 2
    _set_path()
    return run(part, args)


def run(part: str, args: list[str]) -> int:
    """Run `part` in this process like `python -m`, and return its exit code. The import path must be set."""
    import runpy

    sys.argv[1:] = args  # run_module puts the part's own file into argv[0]
    try:
        runpy.run_module(part, run_name="__main__", alter_sys=True)
    except ModuleNotFoundError as error:
        lacks = lacking(part, error)
        if lacks is None:
            raise  # a bug in Holdfast; the traceback shows where
        return _refuse(lacks)
    return 0


def lacking(part: str, error: ModuleNotFoundError) -> str | None:
    """Return an error message if `part` lacks one of the packages that may be missing; otherwise None."""
    name = (error.name or "").partition(".")[0]
    if name not in DISTRIBUTIONS:
        return None
    return (
        f"the {part} needs {name}, which this Python lacks; run"
        f" {sys.executable} -m pip install {DISTRIBUTIONS[name]}"
    )


def _missing(part: str) -> str | None:
    """Return an error message if `part` is unknown or not installed; otherwise None."""
    if part.partition(".")[0] not in PARTS:
        return f"unknown part {part!r}; the parts are {', '.join(PARTS)}"
    path = os.path.join(_folder(), *part.split("."))
    # Requiring `__main__.py` rules out an unrelated package of the same name, such as supervisord, next to a
    # bare copy of `holdfast/`.
    if os.path.isfile(os.path.join(path, "__main__.py")) or os.path.isfile(f"{path}.py"):
        return None
    return f"no {part} in {_folder()}: this copy of Holdfast can only run `holdfast launch`"


def _set_path() -> None:
    """Put the parts' directory first on the path, and bind the name `holdfast` to this package.

    Python adds the directory of this package to the path, because it contains the script. This function
    removes that directory, because its modules, such as `errors`, could hide others of the same name. It does
    not add the parent directory, which may be site-packages: its packages would then take precedence over the
    standard library. The package is therefore imported from its file.
    """
    import importlib.util

    sys.path[:] = [_folder(), *(p for p in sys.path if p and os.path.realpath(p) != _PACKAGE)]
    spec = importlib.util.spec_from_file_location(
        "holdfast",
        os.path.join(_PACKAGE, "__init__.py"),
        submodule_search_locations=[_PACKAGE],
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["holdfast"] = module
    spec.loader.exec_module(module)


def _refuse(problem: str) -> int:
    sys.stderr.write(f"holdfast: {problem}\n")
    return 2


if __name__ == "__main__":
    sys.exit(_become(sys.argv[1], sys.argv[2:]))

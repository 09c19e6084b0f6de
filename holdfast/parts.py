"""Where the parts of Holdfast live, how to start one, and what a user's script may import.

`supervisor`, `sidecar` and `trainer` are names that other people's packages have too, so the parts
are programs, not libraries: each runs in a process of its own that has their folder first on its
path, and nobody else's path ever holds that folder. This file is that process's first line as well
as a module: run as a script it clears the path and becomes the part. So it imports little and late.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

PARTS = ("supervisor", "sidecar", "nodeagent", "trainer")

# What a part may find missing: the name it imports, and the distribution that has it.
DISTRIBUTIONS = {
    "aiohttp": "aiohttp",
    "prometheus_client": "prometheus_client",
    "pynvml": "nvidia-ml-py",
    "tomli": "tomli",
    "torch": "torch",
    "numpy": "numpy",
    "sklearn": "scikit-learn",
}

# The folder is resolved, not the file: we may be imported through `import_root`'s link, and an
# installer may have linked every file of ours to a store of its own.
_PACKAGE = os.path.realpath(os.path.dirname(__file__))
_SCRIPT = os.path.join(_PACKAGE, "parts.py")
_TEMPLATE = "--template"


def folder() -> Path:
    """Return the folder that holds the parts: `holdfast/_parts`, or the checkout's root."""
    from pathlib import Path

    return Path(_folder())


def command(part: str, *args: str) -> list[str]:
    """Return the command line that starts `part` (`sidecar`, or a module of one: `trainer.gpt`)."""
    assert part.partition(".")[0] in PARTS, part
    return [sys.executable, _SCRIPT, part, *args]


def template_command(parent: int, control: int, *modules: str) -> list[str]:
    """Return the command line of the process that parts are forked from once it has `modules`."""
    return [sys.executable, _SCRIPT, _TEMPLATE, str(parent), str(control), *modules]


def import_root(directory: Path) -> Path:
    """Make `directory` hold a link to our package and nothing else, and return its absolute path.

    Put on a PYTHONPATH it lets a script import `holdfast`, this one, and none of our neighbours.
    Safe to repeat and to race with others. Raises OSError when folder or link cannot be made.
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
    """Return PYTHONPATH with `root` after all that is there."""
    known = environment.get("PYTHONPATH", "")
    return f"{known}{os.pathsep}{root}" if known else str(root)


def _folder() -> str:
    inside = os.path.join(_PACKAGE, "_parts")
    return inside if os.path.isdir(inside) else os.path.dirname(_PACKAGE)


def _become(part: str, args: list[str]) -> int:
    """Find `part` and `run` it."""
    if part == _TEMPLATE:
        _set_path()
        from holdfast.process import fork_server

        words = fork_server.serve(args)
        return run(words[0], words[1:]) if words else 0
    problem = _missing(part)
    if problem:
        return _refuse(problem)
    _set_path()
    return run(part, args)


def run(part: str, args: list[str]) -> int:
    """Run `part`, which can be found, in this process as `-m part` would, and return its exit code."""
    import runpy

    sys.argv[1:] = args  # run_module puts the part's own file into argv[0]
    try:
        runpy.run_module(part, run_name="__main__", alter_sys=True)
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name not in DISTRIBUTIONS:
            raise  # a mistake of ours: the traceback says where
        return _refuse(
            f"the {part} needs {name}, which this Python lacks:"
            f" {sys.executable} -m pip install {DISTRIBUTIONS[name]}"
        )
    return 0


def _missing(part: str) -> str | None:
    """Say what is wrong with `part`, if it is no part of ours or was not installed."""
    if part.partition(".")[0] not in PARTS:
        return f"unknown part {part!r}; the parts are {', '.join(PARTS)}"
    path = os.path.join(_folder(), *part.split("."))
    # `__main__.py` tells our supervisor from a supervisord beside a bare copy of `holdfast/`.
    if os.path.isfile(os.path.join(path, "__main__.py")) or os.path.isfile(f"{path}.py"):
        return None
    return f"no {part} in {_folder()}: this copy of holdfast can only launch"


def _set_path() -> None:
    """Let the parts be found first and `holdfast` mean this package; the rest stays as it was.

    Our own folder, which Python adds as the script's, goes: its modules have names like
    `safetensors`. The folder around it is not added: in site-packages it would put what others
    installed ahead of the standard library. So the package is bound by its place.
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

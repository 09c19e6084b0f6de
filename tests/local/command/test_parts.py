from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from holdfast import parts

REPORT = """
import json, sys
import holdfast
print(json.dumps({
    "name": __name__, "argv": sys.argv, "path": sys.path, "holdfast": holdfast.__file__,
    "main": sys.modules["__main__"].__file__,
}))
"""
PACKAGE = Path(parts.__file__).parent


def installation(root: Path, **programs: str) -> Path:
    """Lay out `holdfast/` as a wheel does, with one program per part, and return its `parts.py`."""
    package = root / "site" / "holdfast"
    package.mkdir(parents=True)
    for part, source in programs.items():
        (package / "_parts" / part).mkdir(parents=True)
        (package / "_parts" / part / "__init__.py").touch()
        (package / "_parts" / part / "__main__.py").write_text(source)
    for module in ("__main__.py", "exit_codes.py", "parts.py", "version.py"):
        shutil.copy(PACKAGE / module, package)
    (package / "__init__.py").touch()
    return package / "parts.py"


def python(
    *arguments: str | Path, cwd: Path | None = None, flags: tuple[str, ...] = (), **variables: str
) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYT")}
    return subprocess.run(
        [sys.executable, *flags, *arguments],
        cwd=cwd,
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=30,
    )


def test_in_a_checkout_the_parts_are_next_to_the_package() -> None:
    assert (parts.folder() / "supervisor" / "__init__.py").is_file()
    assert (parts.folder() / "holdfast").samefile(PACKAGE)


def test_a_command_consists_of_this_python_and_the_full_path_of_a_script() -> None:
    program = parts.command("sidecar", "--member", "m0")
    assert program == [
        sys.executable,
        str(PACKAGE.resolve() / "parts.py"),
        "sidecar",
        "--member",
        "m0",
    ]


def test_a_part_runs_as_the_main_module_with_its_arguments(tmp_path: Path) -> None:
    script = installation(tmp_path, sidecar=REPORT)
    report = json.loads(python(script, "sidecar", "--x", "1").stdout)
    assert report["name"] == "__main__"
    assert report["main"] == report["argv"][0] == str(script.parent / "_parts/sidecar/__main__.py")
    assert report["argv"][1:] == ["--x", "1"]


@pytest.mark.parametrize("flags", [(), ("-P",)] if sys.version_info >= (3, 11) else [()])
def test_the_import_path_begins_with_the_parts_and_excludes_the_package_and_the_working_directory(
    tmp_path: Path, flags: tuple[str, ...]
) -> None:
    script = installation(tmp_path, sidecar=REPORT)
    for name in ("sidecar", "holdfast", "json"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('taken from the working directory')")
    report = json.loads(python(script, "sidecar", cwd=tmp_path, flags=flags).stdout)
    assert report["path"][0] == str(script.parent / "_parts")
    assert str(script.parent) not in report["path"]
    assert str(script.parent.parent) not in report["path"]
    assert str(tmp_path) not in report["path"]


def test_a_part_imports_the_package_that_it_was_installed_with(tmp_path: Path) -> None:
    script = installation(tmp_path, sidecar=REPORT)
    other = tmp_path / "other" / "holdfast"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("raise SystemExit('another holdfast')")
    report = json.loads(python(script, "sidecar", PYTHONPATH=str(other.parent)).stdout)
    assert report["holdfast"] == str(script.parent / "__init__.py")


def test_children_of_a_part_inherit_no_path_of_the_parts(tmp_path: Path) -> None:
    child = "import os, sys; print([v for v in [*os.environ.values(), *sys.path] if '_parts' in v])"
    source = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {child!r}], check=True)\n"
    assert python(installation(tmp_path, sidecar=source), "sidecar").stdout == "[]\n"


def test_the_exit_code_is_that_of_the_part(tmp_path: Path) -> None:
    assert python(installation(tmp_path, sidecar="import sys; sys.exit(7)"), "sidecar").returncode == 7


def test_a_module_of_a_part_can_be_started(tmp_path: Path) -> None:
    script = installation(tmp_path, trainer="")
    (script.parent / "_parts" / "trainer" / "gpt.py").write_text(REPORT)
    assert json.loads(python(script, "trainer.gpt").stdout)["argv"][1:] == []


@pytest.mark.parametrize(("missing", "install"), [("aiohttp", "aiohttp"), ("sklearn.utils", "scikit-learn")])
def test_a_missing_dependency_is_reported_in_one_line_with_what_to_install(
    tmp_path: Path, missing: str, install: str
) -> None:
    script = installation(tmp_path, sidecar=f"import {missing}")
    ended = python(script, "sidecar", flags=("-S",))  # no site-packages
    assert ended.returncode == 2
    name = missing.partition(".")[0]
    assert ended.stderr == (
        f"holdfast: the sidecar needs {name}, which this Python lacks; run"
        f" {sys.executable} -m pip install {install}\n"
    )


def test_a_missing_module_that_is_no_dependency_keeps_its_traceback(tmp_path: Path) -> None:
    ended = python(installation(tmp_path, sidecar="import no_such_module"), "sidecar")
    assert ended.returncode == 1
    assert "Traceback" in ended.stderr


def test_a_missing_part_is_named_even_if_another_package_has_its_name(tmp_path: Path) -> None:
    script = installation(tmp_path)
    (tmp_path / "site" / "supervisor").mkdir()  # supervisord's package
    (tmp_path / "site" / "supervisor" / "__init__.py").touch()
    ended = python(script, "supervisor")
    assert ended.returncode == 2
    site = tmp_path / "site"
    why = "this copy of Holdfast can only run `holdfast launch`"
    assert ended.stderr == f"holdfast: no supervisor in {site}: {why}\n"
    assert "unknown part 'sidekar'; the parts are" in python(script, "sidekar").stderr


def test_a_missing_node_agent_is_not_taken_for_the_verdict_of_a_check(tmp_path: Path) -> None:
    script = installation(tmp_path)
    assert python(script, "nodeagent", "check").returncode == 64
    assert python(script, "nodeagent", "serve").returncode == 2


def test_an_import_root_lets_a_script_import_holdfast_and_its_own_modules(tmp_path: Path) -> None:
    root = parts.import_root(tmp_path / "a" / "root")
    assert [entry.name for entry in root.iterdir()] == ["holdfast"]
    (tmp_path / "trainer.py").write_text("MINE = True")
    (tmp_path / "train.py").write_text(
        "import trainer, importlib.util, holdfast.parts as p\n"
        "print(trainer.MINE, importlib.util.find_spec('sidecar'), p.__file__, p.folder())\n"
    )
    ended = python(tmp_path / "train.py", PYTHONPATH=str(root))
    seen = f"{root / 'holdfast' / 'parts.py'} {parts.folder()}"
    assert ended.stdout == f"True None {seen}\n", ended.stderr


def test_an_import_root_can_be_created_again_and_points_to_the_package(tmp_path: Path) -> None:
    tmp_path.joinpath("holdfast").symlink_to("elsewhere")
    for _ in range(2):
        assert parts.import_root(tmp_path) == tmp_path
        assert [entry.name for entry in tmp_path.iterdir()] == ["holdfast"]
        assert (tmp_path / "holdfast").samefile(PACKAGE)


def test_an_import_root_can_be_created_by_many_threads_at_once(tmp_path: Path) -> None:
    barrier = threading.Barrier(8)
    made: list[Path] = []

    def make() -> None:
        barrier.wait()
        made.append(parts.import_root(tmp_path / "root"))

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [tmp_path / "root"] * 8
    assert (tmp_path / "root" / "holdfast").samefile(PACKAGE)

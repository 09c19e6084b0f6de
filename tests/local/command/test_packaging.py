"""The built wheel in a new environment, alongside supervisord and a user's modules of the same names."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import zipfile
from collections.abc import Callable
from email.parser import Parser
from pathlib import Path

import pytest

from holdfast import parts
from holdfast.version import __version__

pytestmark = pytest.mark.local

ROOT = Path(__file__).parents[3]
Run = Callable[..., str]


def run(*command: str | Path, cwd: Path | None = None) -> str:
    """Return what `command` prints. If it fails, the assertion shows its whole output."""
    ended = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, f"{command}\n{ended.stdout}\n{ended.stderr}"
    return ended.stdout


def sources(folder: str) -> set[str]:
    """Return the files of a folder of the checkout by their path from its root."""
    files = (path for path in (ROOT / folder).rglob("*") if path.is_file())
    return {str(path.relative_to(ROOT)) for path in files if path.parent.name != "__pycache__"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the source distribution, and the wheel from it."""
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def bin_folder(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel and supervisord with pip into a new environment, as a user would."""
    environment = tmp_path_factory.mktemp("user") / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", environment)
    pip = (sys.executable, "-m", "pip", "--python", environment, "install", "--quiet", "--no-input")
    run(*pip, wheel, "supervisor")
    return environment / "bin"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A user's folder, with modules that are named like Holdfast's parts."""
    for name in parts.PARTS:
        (tmp_path / f"{name}.py").write_text("WHOSE = 'theirs'\n")
    (tmp_path / "train.py").write_text(
        "import holdfast, nodeagent, sidecar, supervisor, trainer\n"
        "print(nodeagent.WHOSE, sidecar.WHOSE, supervisor.WHOSE, trainer.WHOSE)\n"
    )
    return tmp_path


def test_the_wheel_contains_the_package_and_the_parts_inside_it(wheel: Path) -> None:
    expected = sources("holdfast")
    for part in parts.PARTS:
        expected |= {f"holdfast/_parts/{name}" for name in sources(part)}
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    about = f"holdfast-{__version__}.dist-info/"
    assert {name for name in names if not name.startswith(about)} == expected
    assert {"holdfast/py.typed", "holdfast/__init__.py", f"{about}licenses/LICENSE"} <= names


def test_the_wheel_requires_each_distribution_that_a_part_names(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        about = archive.read(f"holdfast-{__version__}.dist-info/METADATA").decode()
    required = " ".join(Parser().parsestr(about).get_all("Requires-Dist", []))
    for distribution in parts.DISTRIBUTIONS.values():
        assert distribution.replace("_", "-") in required


def test_holdfast_and_supervisord_share_no_file(bin_folder: Path) -> None:
    assert run(bin_folder / "holdfast", "--version") == f"holdfast {__version__}\n"
    assert run(bin_folder / "supervisord", "--version").strip()
    listing = "import importlib.metadata as m, json; print(json.dumps(list(map(str, m.files('{}')))))"
    ours, theirs = (
        set(json.loads(run(bin_folder / "python", "-c", listing.format(name))))
        for name in ("holdfast", "supervisor")
    )
    assert not ours & theirs
    top = {name.partition("/")[0] for name in ours if not name.startswith("..")}
    assert top == {"holdfast", f"holdfast-{__version__}.dist-info"}


def test_the_installed_node_agent_finds_its_tables(bin_folder: Path, project: Path) -> None:
    said = run(bin_folder / "holdfast", "node", "explain", "xid", "79", cwd=project)
    assert "GPU dropped off the PCIe bus" in said
    assert "every 15 s" in run(bin_folder / "holdfast", "node", "explain", "check", "memory_used")


def test_the_installed_command_starts_the_part_from_inside_the_package(
    bin_folder: Path, project: Path
) -> None:
    usage = run(bin_folder / "holdfast", "--help", cwd=project)
    assert "run" in usage
    assert "demo" in usage


@pytest.mark.parametrize("environment", ["installed", "editable"])
def test_a_script_imports_its_own_modules_instead_of_the_parts(
    environment: str, bin_folder: Path, project: Path
) -> None:
    python = bin_folder / "python" if environment == "installed" else Path(sys.executable)
    assert run(python, "train.py", cwd=project) == "theirs theirs theirs theirs\n"


def test_the_editable_install_exposes_only_holdfast(tmp_path: Path) -> None:
    found = (
        "import importlib.util as u\n"
        "names = ('holdfast', 'supervisor', 'sidecar', 'nodeagent', 'trainer', 'bench', 'tests')\n"
        "print([name for name in names if u.find_spec(name)])"
    )
    assert run(sys.executable, "-c", found, cwd=tmp_path) == "['holdfast']\n"


@pytest.fixture(scope="module")
def with_torch(bin_folder: Path) -> Path:
    """Make this environment's torch importable in the user's environment, as in an image with torch."""
    purelib = Path(
        run(bin_folder / "python", "-c", "import sysconfig as s; print(s.get_path('purelib'))").strip()
    )
    for name in ("torch", "numpy"):
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        lent = Path(spec.origin).parents[1]
        (purelib / "lent.pth").write_text(f"import sys; sys.path.append({str(lent)!r})\n")
    return bin_folder


@pytest.mark.timeout(240)
def test_the_installed_wheel_runs_the_demo(with_torch: Path, project: Path) -> None:
    """It recovers from three faults in a folder of modules named like the parts, and proves the result."""
    said = run(with_torch / "holdfast", "demo", "--quick", cwd=project)
    assert "All state is bit-for-bit identical in both runs" in said
    assert said.count("back in") == 3
    assert run(with_torch / "supervisord", "--version").strip()

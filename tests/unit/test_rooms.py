"""A package lists at most twelve modules, so that its listing answers where something is."""

from __future__ import annotations

from pathlib import Path

from tests.unit.literals import ROOT

MOST = 12
PARTS = ("holdfast", "supervisor", "sidecar", "nodeagent", "trainer", "bench", "tests")
SCRIPTS = ROOT / "tests/local/scripts"  # programs that tests run: a list of cases, not of modules


def modules(package: Path) -> list[str]:
    return [
        path.stem for path in package.glob("*.py") if path.stem not in ("__init__", "__main__", "conftest")
    ]


def test_no_package_lists_more_than_twelve_modules() -> None:
    packages = {path.parent for part in PARTS for path in (ROOT / part).rglob("*.py")} - {SCRIPTS}
    assert len(packages) > 50
    too_long = {str(package.relative_to(ROOT)): len(modules(package)) for package in packages}
    assert {name: count for name, count in too_long.items() if count > MOST} == {}

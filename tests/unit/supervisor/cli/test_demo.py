"""The demo stores its runs in a directory, or states why it cannot."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("given", ["file", "file/below"])
def test_an_unusable_run_directory_is_named_in_one_line(tmp_path: Path, given: str) -> None:
    (tmp_path / "file").write_text("mine")
    words = [sys.executable, "-m", "holdfast", "demo", "--run-dir", str(tmp_path / given)]
    ended = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    [line] = ended.stderr.splitlines()
    assert line.startswith(f"holdfast: --run-dir {str(tmp_path / given)!r} ")
    assert "give a directory" in line or "choose another directory" in line
    assert (tmp_path / "file").read_text() == "mine"

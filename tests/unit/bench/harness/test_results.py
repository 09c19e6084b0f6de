from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from bench.harness import results


def test_numbers_that_json_lacks_become_null() -> None:
    found = results.plain({"a": [math.nan, 1.5], 2: (math.inf,), "path": "x"})
    assert found == {"a": [None, 1.5], "2": [None], "path": "x"}
    json.dumps(found, allow_nan=False)


def test_each_result_is_written_to_a_new_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(results, "ROOT", tmp_path)
    monkeypatch.setattr(results, "FOLDER", tmp_path / "bench-results")
    path = results.write({"bench": "snapshot", "value": math.nan})
    assert json.loads(path.read_text())["value"] is None
    assert path.name.startswith("snapshot-")
    assert f"bench-results/{path.name}" in capsys.readouterr().out

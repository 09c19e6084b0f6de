from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from nodeagent.sensing import operator_clear
from nodeagent.sensing.operator_clear import FILE, OperatorClear


def reader(folder: Path, position: object = None) -> OperatorClear:
    return OperatorClear(folder, lambda: 7.0, position)


def entities(word: OperatorClear) -> list[str]:
    return [each.entity for each in word.read()]


def test_a_clear_is_read_once(tmp_path: Path) -> None:
    word = reader(tmp_path)
    assert entities(word) == []
    operator_clear.record_clear(tmp_path, "gpu/a", "exchanged", 1.0)
    operator_clear.record_clear(tmp_path, "node", "", 2.0)
    assert entities(word) == ["gpu/a", "node"]
    assert entities(word) == []
    operator_clear.record_clear(tmp_path, "gpu/b", "", 3.0)
    assert entities(reader(tmp_path, word.position())) == ["gpu/b"]


def test_a_partial_line_is_read_once_it_is_complete(tmp_path: Path) -> None:
    word = reader(tmp_path)
    path = tmp_path / FILE
    path.write_bytes(b'{"entity": "gp')
    assert entities(word) == []
    with path.open("ab") as file:
        file.write(b'u/a", "wall_s": 1}\n')
    assert entities(word) == ["gpu/a"]


def test_a_replaced_file_is_read_from_its_beginning(tmp_path: Path) -> None:
    operator_clear.record_clear(tmp_path, "gpu/a", "x" * 300, 1.0)
    word = reader(tmp_path)
    assert entities(word) == ["gpu/a"]
    (tmp_path / FILE).write_text('{"entity": "gpu/b", "wall_s": 2}\n')
    assert entities(word) == ["gpu/b"]


def test_a_clear_takes_effect_at_its_own_time_and_never_later(tmp_path: Path) -> None:
    operator_clear.record_clear(tmp_path, "gpu/a", "", 5.0)
    operator_clear.record_clear(tmp_path, "gpu/b", "by a clock that is ahead", 1e9)
    assert [(each.entity, each.at_s) for each in reader(tmp_path).read()] == [("gpu/a", 5.0), ("gpu/b", 7.0)]


@given(st.binary(max_size=300))
def test_any_bytes_are_read_without_an_error(tmp_path_factory: object, raw: bytes) -> None:
    folder = tmp_path_factory.mktemp("word")  # type: ignore[attr-defined]
    (folder / FILE).write_bytes(raw + b"\n")
    word = reader(folder)
    assert all(isinstance(each, str) and each for each in entities(word))
    assert word.position() == len(raw) + 1

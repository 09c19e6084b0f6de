from __future__ import annotations

from pathlib import Path

import pytest

from sidecar.obeyed import FILE, Obeyed, Standing


def test_what_is_older_than_anything_obeyed_before_is_refused_also_after_a_restart(tmp_path: Path) -> None:
    obeyed = Obeyed(tmp_path)
    assert obeyed.refusal(Standing()) == ""
    obeyed.take(Standing(2, 5))
    obeyed.take(Standing(1, 9))  # never a step back
    for each in (obeyed, Obeyed(tmp_path)):
        assert each.newest == Standing(2, 5)
        assert "a supervisor of epoch 2 has taken the run over" in each.refusal(Standing(1, 9))
        assert "generation 5 is here already" in each.refusal(Standing(2, 4))
        assert not any(each.refusal(at) for at in (Standing(2, 5), Standing(2, 6), Standing(3, 0)))
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"epoch": "3"}', '{"epoch": 1, "more": 2}', "9" * 9000])
def test_a_damaged_file_costs_what_was_in_it(content: str, tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(content)
    assert Obeyed(tmp_path).newest == Standing()


def test_a_folder_that_cannot_be_written_does_not_keep_an_order_from_being_obeyed(tmp_path: Path) -> None:
    obeyed = Obeyed(tmp_path / "missing")
    obeyed.take(Standing(3, 1))
    assert obeyed.newest == Standing(3, 1)

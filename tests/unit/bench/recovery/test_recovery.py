from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.recovery.recovery import main, plan
from bench.workloads.modes import modes

MODES = modes()


@given(st.integers(0, 200), st.integers(0, 50), st.integers(1, 12))
def test_rounds_give_every_mode_all_of_its_kills(kills: int, others: int, rounds: int) -> None:
    planned = plan(MODES, kills, others, rounds)
    for mode in MODES:
        mine = [count for each, count in planned if each is mode]
        assert sum(mine) == (kills if mode.name == "holdfast" else others)
        assert all(count > 0 for count in mine)
        if len(mine) == rounds:
            assert max(mine) - min(mine) <= 1


def test_every_other_round_is_reversed() -> None:
    planned = plan(MODES, 4, 4, 2)
    names = [mode.name for mode, _ in planned]
    assert names[: len(MODES)] == names[: len(MODES) - 1 : -1]


def test_the_same_script_runs_under_holdfast_and_torchrun() -> None:
    scripts = {mode.name: mode.argv[-1] for mode in MODES}
    assert scripts["holdfast"] == scripts["torchrun"] == scripts["torchrun-fresh"]
    assert scripts["holdfast-unmodified"] == scripts["torchrun-unmodified"] != scripts["holdfast"]


@pytest.mark.parametrize(
    ("argv", "named"),
    [(["--kills", "-1"], "--kills: -1"), (["--rounds", "0"], "--rounds: 0"), (["--modes", "x"], "'x'")],
)
def test_a_bad_option_is_named_in_the_message(
    argv: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    assert named in capsys.readouterr().err

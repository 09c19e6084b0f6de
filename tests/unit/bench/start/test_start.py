from __future__ import annotations

import pytest

from bench.start import part_restarts, start


def test_every_other_round_is_reversed_and_all_modes_run_the_same_script() -> None:
    assert [*start.order(0)] == [*reversed(start.order(1))] == [*start.MODES]
    assert len({mode.argv[-1] for mode in start.MODES}) == 1


def status(*sidecars: tuple[int, bool]) -> dict[str, object]:
    return {"members": [{"sidecar_pid": pid, "connected": connected} for pid, connected in sidecars]}


def test_a_sidecar_is_back_once_its_replacement_is_connected() -> None:
    assert not part_restarts._is_back(status((7, True), (8, True)), "sidecar", 7)
    assert not part_restarts._is_back(status((7, False), (8, True)), "sidecar", 7)
    assert not part_restarts._is_back(status((9, False), (8, True)), "sidecar", 7)
    assert part_restarts._is_back(status((9, True), (8, True)), "sidecar", 7)


def test_a_supervisor_is_back_once_it_answers() -> None:
    assert part_restarts._is_back(status((7, False)), "supervisor", 5)


@pytest.mark.parametrize(
    ("argv", "named"), [(["--rounds", "0"], "--rounds: 0"), (["--kills", "-1"], "--kills: -1")]
)
def test_a_bad_option_is_named_in_the_message(
    argv: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        start.main(argv)
    assert ended.value.code == 2
    assert named in capsys.readouterr().err

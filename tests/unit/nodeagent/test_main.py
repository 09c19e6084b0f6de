from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from nodeagent import __main__ as program


@pytest.fixture
def interval() -> Iterator[None]:
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("interval")
def test_threads_of_the_agent_yield_to_each_other_sooner_than_a_flood_overwrites_the_log(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert program.main(["explain", "xid", "79"]) == 0
    assert sys.getswitchinterval() <= 0.001
    assert "79" in capsys.readouterr().out

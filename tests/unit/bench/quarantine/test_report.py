from __future__ import annotations

import inspect

import pytest

from bench.quarantine.report import HOLDS
from bench.quarantine.tally import UNCONFIRMED
from supervisor.quarantine import breaker, decide, storms

SOURCES = "".join(inspect.getsource(module) for module in (breaker, decide, storms))


@pytest.mark.parametrize("words", [*HOLDS, UNCONFIRMED])
def test_the_decision_still_uses_the_words_by_which_the_report_sorts_its_holds(words: str) -> None:
    assert words in SOURCES

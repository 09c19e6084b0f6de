from __future__ import annotations

import inspect

import pytest

from bench.quarantine.report import HOLDS
from bench.quarantine.tally import UNCONFIRMED
from supervisor.quarantine import admission, breaker, cohorts, decide, storms

SOURCES = "".join(inspect.getsource(module) for module in (admission, breaker, cohorts, decide, storms))


@pytest.mark.parametrize("words", [*HOLDS, UNCONFIRMED])
def test_the_words_by_which_the_report_sorts_holds_occur_in_the_decision(words: str) -> None:
    assert words in SOURCES

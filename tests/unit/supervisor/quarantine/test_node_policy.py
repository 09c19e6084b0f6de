from __future__ import annotations

import pytest

from supervisor.quarantine.model import NodePolicy


def test_the_defaults_agree_with_each_other() -> None:
    assert NodePolicy().memory_s == 2400.0


def test_all_mistakes_are_named_at_once() -> None:
    with pytest.raises(ValueError, match=r"max_share.*confirm_s.*max_clean_s.*drain_for"):
        NodePolicy(max_share=1.5, confirm_s=400.0, max_clean_s=1.0, drain_for=frozenset({"explode"}))


def test_a_proof_that_is_shorter_than_a_storm_would_make_one_of_a_release() -> None:
    with pytest.raises(ValueError, match="clean_s: expected at least"):
        NodePolicy(clean_s=2000.0)

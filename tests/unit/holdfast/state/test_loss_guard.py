"""The loss guard detects jumps, learns from the other losses, and reports each jump in a text."""

from __future__ import annotations

import json
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.state.loss_guard import LossGuard

SCALES = st.sampled_from([1e-4, 0.01, 1.0, 30.0, 1e4])
SEEDS = st.integers(0, 10_000)


def judged(guard: LossGuard, loss: float, grad_norm: float | None = None) -> str:
    """Return the verdict on a step, and let the guard learn from the step if it is ok."""
    verdict = guard.check(loss, grad_norm)
    if verdict == "ok":
        guard.learn(loss, grad_norm)
    return verdict


def verdicts(guard: LossGuard, losses: list[float]) -> set[str]:
    return {judged(guard, loss) for loss in losses}


def knowing(
    losses: list[float], first: list[float] | None = None, window: int = 64, factor: float = 10.0
) -> LossGuard:
    """Return a guard that needs no minimum of losses and has learned these losses."""
    guard = LossGuard(window, min_count=1, factor=factor)
    guard.restore({"losses": losses, "grad_norms": [], "first": first or []})
    return guard


def trained(level: float = 3.0, spread: float = 0.1) -> LossGuard:
    guard, chance = LossGuard(), random.Random(0)
    assert verdicts(guard, [chance.gauss(level, spread) for _ in range(64)]) == {"ok"}
    return guard


@pytest.mark.parametrize(
    ("loss", "grad_norm", "expected"),
    [
        (math.nan, 1.0, "nan"),
        (math.inf, 1.0, "inf"),
        (-math.inf, 1.0, "inf"),
        (3.0, math.nan, "nan"),
        (3.0, math.inf, "inf"),
        (3.0, None, "ok"),
        (3.0, 1e9, "ok"),
        (30.0, 1.0, "jump"),
        (1e300, None, "jump"),
        (0.0, 1.0, "ok"),
        (-1e9, 1.0, "ok"),
    ],
)
def test_each_kind_of_value_is_named(loss: float, grad_norm: float | None, expected: str) -> None:
    assert trained().check(loss, grad_norm) == expected


def test_nothing_is_a_jump_before_enough_losses_are_known() -> None:
    guard = LossGuard(min_count=16)
    assert verdicts(guard, [1.0] * 15) == {"ok"}
    assert guard.check(1e6, None) == "ok"
    guard = LossGuard(min_count=16)
    assert verdicts(guard, [1.0] * 16) == {"ok"}
    assert guard.check(1e6, None) == "jump"


def test_a_bad_stretch_does_not_become_the_norm() -> None:
    guard = trained()
    for _ in range(200):
        assert guard.check(30.0, None) == "jump"
        assert guard.check(math.nan, None) == "nan"
    assert guard.check(3.0, None) == "ok"


def test_gradient_norms_are_judged_only_on_request() -> None:
    guard = LossGuard(factor_grad=10.0)
    for _ in range(32):
        assert judged(guard, 1.0, 2.0) == "ok"
    assert guard.check(1.0, 50.0) == "jump"
    assert guard.check(1.0, 2.1) == "ok"


@given(seed=SEEDS, scale=SCALES, spread=st.floats(0.0, 0.5))
def test_noise_is_not_a_jump(seed: int, scale: float, spread: float) -> None:
    chance = random.Random(seed)
    losses = [scale * abs(chance.gauss(1.0, spread)) for _ in range(400)]
    assert verdicts(LossGuard(), losses) == {"ok"}


@given(seed=SEEDS, scale=SCALES, rise=st.floats(0.0, 0.01))
def test_a_slow_rise_is_not_a_jump(seed: int, scale: float, rise: float) -> None:
    chance = random.Random(seed)
    losses = [scale * (1 + rise * step) * chance.uniform(0.9, 1.1) for step in range(400)]
    assert verdicts(LossGuard(), losses) == {"ok"}


@given(seed=SEEDS, scale=SCALES, after=st.floats(0.01, 1.0))
def test_a_drop_is_not_a_jump_nor_are_the_losses_after_it(seed: int, scale: float, after: float) -> None:
    chance = random.Random(seed)
    levels = [scale] * 200 + [scale * after] * 200
    assert verdicts(LossGuard(), [level * chance.uniform(0.8, 1.2) for level in levels]) == {"ok"}


def test_a_hard_sample_for_a_converged_model_is_not_a_jump() -> None:
    chance = random.Random(1)
    losses = [0.002 * chance.expovariate(1.0) for _ in range(2000)]
    losses[500::100] = [0.3] * len(losses[500::100])
    assert verdicts(LossGuard(), losses) == {"ok"}


@given(seed=SEEDS, scale=st.floats(1.0, 100.0), times=st.floats(20.0, 1e6))
def test_a_real_jump_is_detected(seed: int, scale: float, times: float) -> None:
    chance = random.Random(seed)
    guard = LossGuard()
    assert verdicts(guard, [scale * chance.uniform(0.7, 1.3) for _ in range(100)]) == {"ok"}
    assert guard.check(scale * times, None) == "jump"


def learned(guard: LossGuard) -> dict[str, list[float]]:
    return {name: list(values) for name, values in guard.learned().items()}


@given(
    losses=st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=150),
    after=st.lists(st.floats(), max_size=20),
)
def test_a_restored_guard_judges_like_the_saved_one(losses: list[float], after: list[float]) -> None:
    guard, again = LossGuard(factor_grad=5.0), LossGuard(factor_grad=5.0)
    for loss in losses:
        judged(guard, loss, loss)
    again.restore(json.loads(json.dumps(learned(guard), allow_nan=False)))
    assert learned(again) == learned(guard)
    assert [judged(guard, x, x) for x in after] == [judged(again, x, x) for x in after]


@pytest.mark.parametrize(
    "state",
    [{}, {"losses": 3, "grad_norms": []}, {"losses": [math.nan], "grad_norms": []},
     {"losses": [], "grad_norms": ["1"]}],
)  # fmt: skip
def test_an_invalid_state_is_refused_and_changes_nothing(state: dict[str, object]) -> None:
    guard = trained()
    before = learned(guard)
    with pytest.raises(ValueError, match="loss guard"):
        guard.restore(state)
    assert learned(guard) == before


def test_a_guard_without_losses_reports_that() -> None:
    assert LossGuard().usual() == "no losses yet"


# For each of the five terms, a history where it alone decides the limit.
LIMITS = {
    "the least rise": ([1.0] * 3, [], 1.5),
    "the loss of an untrained model": ([1.0] * 3, [2.0, 3.0, 7.0], 4.0),
    "the same, of a loss below 0": ([1.0] * 3, [-3.0], 4.0),
    "the relative spread": ([100.0] * 3, [], 120.0),
    "the same, of losses below 0": ([-100.0] * 3, [], -80.0),
    "the highest loss": ([1.0] * 4 + [11.0], [], 41.0),
    "the usual spread": ([-10.0, -10.0, 0.0, 10.0, 10.0], [], 10.0 * 1.4826 * 10.0),
}


@pytest.mark.parametrize("term", LIMITS)
def test_a_rise_equal_to_the_limit_is_not_a_jump_and_a_larger_one_is(term: str) -> None:
    losses, first, limit = LIMITS[term]
    assert knowing(losses, first).check(limit, None) == "ok"
    assert knowing(losses, first).check(math.nextafter(limit, math.inf), None) == "jump"


@pytest.mark.parametrize(
    ("term", "text"),
    [
        ("the least rise", "last 3: median 1, highest 1; limit 1.5"),
        ("the loss of an untrained model", "last 3: median 1, highest 1; limit 4"),
        ("the same, of a loss below 0", "last 3: median 1, highest 1; limit 4"),
        ("the relative spread", "last 3: median 100, highest 100; limit 120"),
        ("the same, of losses below 0", "last 3: median -100, highest -100; limit -80"),
        ("the highest loss", "last 5: median 1, highest 11; limit 41"),
        ("the usual spread", "last 5: median 0, highest 10; limit 148.3"),
    ],
)
def test_the_text_states_the_limit_that_the_check_uses(term: str, text: str) -> None:
    losses, first, _ = LIMITS[term]
    assert knowing(losses, first).usual() == text


def test_the_text_shows_each_number_with_four_digits() -> None:
    assert knowing([1.23456, 2.34567, 3.45678]).usual() == (
        "last 3: median 2.346, highest 3.457; limit 18.82"
    )


def test_the_factor_applies_to_the_spread_and_to_the_loss() -> None:
    assert knowing([100.0] * 3, factor=50.0).usual().endswith("limit 200")
    assert knowing([0.0, 10.0, 20.0], factor=3.0).usual().endswith("limit 54.48")
    assert knowing([100.0] * 3, factor=50.0).check(200.0, None) == "ok"
    assert knowing([100.0] * 3, factor=50.0).check(200.1, None) == "jump"


@pytest.mark.parametrize(
    ("losses", "median"),
    [
        ([4.0], "4"),
        ([4.0, 1.0], "2.5"),
        ([4.0, 1.0, 2.0], "2"),
        ([8.0, 1.0, 4.0, 2.0], "3"),
        ([1.0e308, 1.7e308], "1.35e+308"),
    ],
)
def test_the_median_of_an_even_number_of_losses_is_the_mean_of_the_middle_two(
    losses: list[float], median: str
) -> None:
    assert f"median {median}, " in knowing(losses).usual()
    if median != "1.35e+308":
        limit = 1.0 + float(median)
        assert knowing([1.0], first=losses).usual().endswith(f"limit {limit:g}")


def test_the_window_forgets_the_oldest_loss() -> None:
    guard = knowing([], window=4)
    for loss in (50.0, 1.0, 3.0, 1.0, 2.0, 1.0):
        guard.accept(loss)
    assert learned(guard)["losses"] == [3.0, 1.0, 2.0, 1.0]
    assert guard.usual() == "last 4: median 1.5, highest 3; limit 8.913"
    guard.accept(1.0)
    assert guard.usual() == "last 4: median 1, highest 2; limit 5"


def test_a_window_that_is_restored_keeps_the_newest_losses() -> None:
    assert learned(knowing([9.0, 1.0, 2.0, 3.0], window=3))["losses"] == [1.0, 2.0, 3.0]
    assert knowing([9.0, 1.0, 2.0, 3.0], window=3).usual().startswith("last 3: median 2, highest 3;")


def test_an_accepted_jump_is_learned_as_a_loss_but_not_as_that_of_an_untrained_model() -> None:
    guard = LossGuard(min_count=4)
    guard.accept(30.0)
    assert learned(guard) == {"losses": [30.0], "grad_norms": [], "first": []}


def test_a_check_changes_nothing_whatever_its_verdict() -> None:
    guard = LossGuard(min_count=2, factor_grad=10.0)
    for _ in range(2):
        assert judged(guard, 1.0, 2.0) == "ok"
    before = learned(guard)
    for loss, grad_norm in ((50.0, 2.0), (1.0, 50.0), (math.nan, 2.0), (1.0, math.inf)):
        assert guard.check(loss, grad_norm) != "ok"
        assert learned(guard) == before
    assert guard.check(1.1, 2.1) == "ok"
    assert learned(guard) == before


def test_the_first_losses_are_as_many_as_a_judgement_needs() -> None:
    guard = LossGuard(min_count=3)
    assert verdicts(guard, [5.0, 4.0, 3.0, 2.0]) == {"ok"}
    assert learned(guard)["first"] == [5.0, 4.0, 3.0]


def test_the_defaults_are_64_losses_16_to_judge_10_spreads_and_no_gradient_norms() -> None:
    guard = LossGuard()
    for step in range(70):
        assert judged(guard, 100.0, 1e9 ** (step % 2)) == "ok"
    assert learned(guard) == {"losses": [100.0] * 64, "grad_norms": [], "first": [100.0] * 16}
    assert guard.usual() == "last 64: median 100, highest 100; limit 200"
    assert LossGuard(min_count=64).check(1.0, None) == "ok"
    for known, expected in ((15, "ok"), (16, "jump")):
        guard = LossGuard()
        guard.restore({"losses": [100.0] * known, "grad_norms": [], "first": []})
        assert guard.check(120.0001, None) == expected


def test_a_gradient_norm_has_the_minimum_rise_and_its_own_factor() -> None:
    def check(grad_norm: float) -> str:
        guard = LossGuard(min_count=1, factor_grad=50.0)
        guard.restore({"losses": [1.0], "grad_norms": [100.0] * 3, "first": [1000.0]})
        return guard.check(1.0, grad_norm)

    assert check(200.0) == "ok"
    assert check(math.nextafter(200.0, math.inf)) == "jump"


@pytest.mark.parametrize("min_count", [0, -1, 5])
def test_a_minimum_number_of_losses_outside_the_window_is_refused(min_count: int) -> None:
    with pytest.raises(ValueError, match="min_count") as caught:
        LossGuard(window=4, min_count=min_count)
    assert str(caught.value) == f"min_count: {min_count} is not between 1 and the window, 4"


@pytest.mark.parametrize("min_count", [1, 4])
def test_the_minimum_may_be_one_loss_or_the_whole_window(min_count: int) -> None:
    assert LossGuard(window=4, min_count=min_count).check(1.0, None) == "ok"


@pytest.mark.parametrize("name", ["losses", "grad_norms", "first"])
@pytest.mark.parametrize("values", [None, 3, (1.0,), ["1"], [1.0, math.nan], [math.inf]])
def test_the_message_names_the_wrong_list(name: str, values: object) -> None:
    state: dict[str, object] = {"losses": [], "grad_norms": [], "first": []}
    with pytest.raises(ValueError, match="loss guard") as caught:
        LossGuard().restore({**state, name: values})
    assert str(caught.value) == f"loss guard: {name} is not a list of finite numbers"


class Counted(float):
    """A number that counts how often numbers of this class are compared or subtracted from."""

    operations = 0

    def __lt__(self, other: float) -> bool:
        Counted.operations += 1
        return float(self) < float(other)

    def __gt__(self, other: float) -> bool:
        Counted.operations += 1
        return float(self) > float(other)

    def __sub__(self, other: float) -> float:
        Counted.operations += 1
        return float(self) - float(other)


def operations(window: int, loss: float) -> int:
    """Return the number of operations of one check of `loss` with a window full of losses near 3."""
    guard, chance = LossGuard(window), random.Random(0)
    for _ in range(window):
        guard.accept(Counted(chance.gauss(3.0, 0.1)))
    Counted.operations = 0
    assert guard.check(Counted(loss), None) == ("ok" if loss < 10 else "jump")
    return Counted.operations


def test_a_typical_loss_is_judged_without_scanning_the_whole_window() -> None:
    """It uses two binary searches: a window 64 times as long costs some 6 more comparisons in each."""
    assert operations(64, 3.0) < 64
    assert operations(4096, 3.0) <= operations(64, 3.0) + 2 * 8


def test_only_a_suspicious_loss_scans_the_whole_window() -> None:
    assert 64 <= operations(64, 30.0) <= 2 * 64

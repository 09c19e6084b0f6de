import json
import math
import random
import timeit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.state.loss_guard import LossGuard

SCALES = st.sampled_from([1e-4, 0.01, 1.0, 30.0, 1e4])
SEEDS = st.integers(0, 10_000)


def verdicts(guard: LossGuard, losses: list[float]) -> set[str]:
    return {guard.check(loss, None) for loss in losses}


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


def test_nothing_is_a_jump_before_enough_is_known() -> None:
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


def test_gradient_norms_are_judged_only_if_asked() -> None:
    guard = LossGuard(factor_grad=10.0)
    for _ in range(32):
        assert guard.check(1.0, 2.0) == "ok"
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
def test_a_step_down_is_not_a_jump_nor_is_what_follows(seed: int, scale: float, after: float) -> None:
    chance = random.Random(seed)
    levels = [scale] * 200 + [scale * after] * 200
    assert verdicts(LossGuard(), [level * chance.uniform(0.8, 1.2) for level in levels]) == {"ok"}


def test_a_hard_sample_of_a_model_that_has_converged_is_not_a_jump() -> None:
    chance = random.Random(1)
    losses = [0.002 * chance.expovariate(1.0) for _ in range(2000)]
    losses[500::100] = [0.3] * len(losses[500::100])
    assert verdicts(LossGuard(), losses) == {"ok"}


@given(seed=SEEDS, scale=st.floats(1.0, 100.0), times=st.floats(20.0, 1e6))
def test_a_real_jump_is_found(seed: int, scale: float, times: float) -> None:
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
def test_a_restored_guard_judges_as_the_one_saved(losses: list[float], after: list[float]) -> None:
    guard, again = LossGuard(factor_grad=5.0), LossGuard(factor_grad=5.0)
    for loss in losses:
        guard.check(loss, loss)
    again.restore(json.loads(json.dumps(learned(guard), allow_nan=False)))
    assert learned(again) == learned(guard)
    assert [guard.check(x, x) for x in after] == [again.check(x, x) for x in after]


@pytest.mark.parametrize(
    "state",
    [{}, {"losses": 3, "grad_norms": []}, {"losses": [math.nan], "grad_norms": []},
     {"losses": [], "grad_norms": ["1"]}],
)  # fmt: skip
def test_a_state_that_is_none_is_refused_and_changes_nothing(state: dict[str, object]) -> None:
    guard = trained()
    before = learned(guard)
    with pytest.raises(ValueError, match="loss guard"):
        guard.restore(state)
    assert learned(guard) == before


def test_a_check_costs_little() -> None:
    guard = trained()
    usual = timeit.Timer(lambda: guard.check(3.0, 1.0))
    suspect = timeit.Timer(lambda: guard.check(30.0, 1.0))
    assert min(usual.repeat(20, 200)) / 200 < 10e-6
    assert min(suspect.repeat(20, 100)) / 100 < 40e-6

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.schedule import FLOOR, warmup_cosine

lengths = st.integers(0, 500)


@given(lengths, lengths, st.integers(0, 1000))
def test_the_factor_is_never_zero_and_never_above_one(warmup: int, steps: int, step: int) -> None:
    assert 0 < warmup_cosine(warmup, steps)(step) <= 1


@given(st.integers(0, 200), st.integers(1, 300))
def test_the_factor_rises_and_then_falls_to_the_floor(warmup: int, more: int) -> None:
    steps = warmup + more
    factors = [warmup_cosine(warmup, steps)(step) for step in range(steps + 2)]
    assert factors[:warmup] == sorted(factors[:warmup])
    assert factors[warmup] == 1
    assert factors[warmup:] == sorted(factors[warmup:], reverse=True)
    assert factors[-1] == factors[-2] == pytest.approx(FLOOR)


def test_a_resumed_scheduler_continues_with_the_same_rates() -> None:
    def scheduler() -> torch.optim.lr_scheduler.LambdaLR:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.3)
        return torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_cosine(3, 20))

    def go(one: torch.optim.lr_scheduler.LambdaLR, steps: int) -> list[float]:
        rates = []
        for _ in range(steps):
            one.optimizer.step()
            one.step()
            rates.append(one.get_last_lr()[0])
        return [float(rate) for rate in rates]

    whole, first, second = scheduler(), scheduler(), scheduler()
    wanted = go(whole, 20)
    assert go(first, 8) == wanted[:8]
    second.load_state_dict(first.state_dict())
    assert go(second, 12) == wanted[8:]

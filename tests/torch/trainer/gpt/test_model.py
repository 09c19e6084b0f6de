import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.gpt.model import BYTES, GPT, loss_of, weight_groups


def small(dropout: float = 0.0, heads: int = 2) -> GPT:
    torch.manual_seed(0)
    return GPT(layers=2, heads=heads, width=8 * heads, context=12, dropout=dropout)


@settings(max_examples=10)
@given(st.integers(1, 3), st.integers(1, 12), st.integers(1, 3))
def test_logits_have_one_row_for_each_byte(batch: int, length: int, heads: int) -> None:
    logits = small(heads=heads)(torch.zeros(batch, length, dtype=torch.long))
    assert logits.shape == (batch, length, BYTES)


def test_a_prediction_does_not_depend_on_later_bytes() -> None:
    model = small().eval()
    text = torch.randint(BYTES, (1, 12))
    changed = text.clone()
    changed[0, 7] ^= 1
    one, two = model(text), model(changed)
    assert torch.equal(one[0, :7], two[0, :7])
    assert not torch.equal(one[0, 7:], two[0, 7:])


def test_a_new_model_predicts_a_uniform_distribution() -> None:
    text = torch.randint(BYTES, (4, 12))
    loss = loss_of(small()(text), text)
    assert abs(loss.item() - math.log(BYTES)) < 0.2


def test_dropout_draws_from_the_global_random_state_only_in_training() -> None:
    model, text = small(dropout=0.5), torch.zeros(1, 4, dtype=torch.long)
    before = torch.get_rng_state()
    assert torch.equal(model.eval()(text), model(text))
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(model.train()(text), model(text))
    assert not torch.equal(torch.get_rng_state(), before)


def test_the_same_seed_creates_the_same_model_and_every_parameter_gets_a_gradient() -> None:
    one, two = small(), small()
    for left, right in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(left, right)
    text = torch.randint(BYTES, (2, 12))
    loss_of(one(text), text).backward()
    assert all(p.grad is not None and p.grad.any() for p in one.parameters())


def test_only_matrices_decay_and_every_parameter_is_in_a_group() -> None:
    model = small()
    matrices, vectors = weight_groups(model, 0.1)
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.1, 0.0)
    sizes = [[p.dim() for p in group["params"]] for group in (matrices, vectors)]  # type: ignore[attr-defined]
    assert set(sizes[0]) == {2}
    assert set(sizes[1]) == {1}
    assert len(sizes[0]) + len(sizes[1]) == len(list(model.parameters()))


def test_each_parameter_outside_the_embeddings_counts_six_operations() -> None:
    width = 16
    block = 12 * width * width + 13 * width  # as in the paper's table 1, with biases and norms
    assert small().flops_per_token() == 6 * (2 * block + 2 * width + BYTES * width)

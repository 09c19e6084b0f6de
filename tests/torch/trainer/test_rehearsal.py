import torch
from torch import nn

from trainer.digest import digests
from trainer.rehearsal import rehearse


def test_a_rehearsal_does_not_change_the_model() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = digests(model, optimizer)
    rehearse(model, lambda copied: copied(torch.randn(5, 3)).sum())
    after = digests(model, optimizer)
    assert {**after, "rng": ""} == {**before, "rng": ""}
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model.training

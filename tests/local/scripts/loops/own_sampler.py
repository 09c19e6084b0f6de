"""The script's own sampler, with a generator that differs from rank to rank."""

from __future__ import annotations

from typing import Any

import torch
from shared_loop import Loop, net
from torch import Tensor


class Sampler:
    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def draw(self) -> Tensor:
        return torch.randn(6, 8, generator=self.generator)

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])


model = net()
loop = Loop()
replica = loop.spread(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
sampler = Sampler(100 + loop.session.rank)
state = loop.protect(model=model, optimizer=optimizer, sampler=sampler)

for _ in loop.steps():
    loss = replica(sampler.draw()).pow(2).mean()
    loop.rest(1)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    loop.rest(2)
    state.commit(loss=loss)
    loop.rest(3)
loop.finish(model=model.state_dict(), optimizer=optimizer.state_dict(), sampler=sampler.state_dict())

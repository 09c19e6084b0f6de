"""A frozen model with a small adapter on each layer (LoRA), and activation checkpointing."""

from __future__ import annotations

import torch
from shared_loop import Loop
from torch import nn
from torch.utils.checkpoint import checkpoint


class Adapted(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)
        self.drop = nn.Dropout(0.1)
        nn.init.zeros_(self.up.weight)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return self.base(given) + self.up(self.down(self.drop(given)))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Adapted(32) for _ in range(3))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            given = checkpoint(layer, given, use_reentrant=False).relu()
        return given


module = Stack()
loop = Loop()
model = loop.spread(module)
optimizer = torch.optim.NAdam([p for p in module.parameters() if p.requires_grad], lr=1e-3)
state = loop.protect(model=model, optimizer=optimizer)

for step in loop.steps():
    loss = (model(loop.batch(step, 32)) - 1).pow(2).mean()
    loop.rest(1)
    loss.backward()
    optimizer.step()
    loop.rest(2)
    optimizer.zero_grad()
    state.commit(loss=loss)
    loop.rest(3)
loop.finish(model=module.state_dict(), optimizer=optimizer.state_dict())

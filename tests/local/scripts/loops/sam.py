"""Sharpness-aware minimization: each step first moves the weights to the worst place nearby, and back."""

from __future__ import annotations

import torch
from shared_loop import Loop, net


class SAM(torch.optim.Optimizer):
    def __init__(self, parameters, base, rho=0.05, **options):
        super().__init__(parameters, {"rho": rho, **options})
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self):
        parameters = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        for parameter in parameters:
            self.state[parameter]["old_p"] = parameter.data.clone()
            parameter.add_(parameter.grad * (0.05 / (norm + 1e-12)))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data = self.state[parameter]["old_p"]
        self.base_optimizer.step()
        self.zero_grad()

    def step(self, closure=None):
        raise RuntimeError("call first_step and second_step")


module = net()
loop = Loop()
model = loop.spread(module)
optimizer = SAM(module.parameters(), torch.optim.SGD, lr=0.05, momentum=0.9)
state = loop.protect(model=model, optimizer=optimizer)

for step in loop.steps():
    given = loop.batch(step)
    loss = model(given).pow(2).mean()
    loss.backward()
    loop.rest(1)
    optimizer.first_step()
    loop.rest(2)
    model(given).pow(2).mean().backward()
    loop.rest(3)
    optimizer.second_step()
    state.commit(loss=loss)
loop.finish(
    model=module.state_dict(), sam=optimizer.state_dict(), base=optimizer.base_optimizer.state_dict()["state"]
)

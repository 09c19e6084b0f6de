"""A bfloat16 model; AdamW works on float32 copies of its parameters, which belong to no module."""

from __future__ import annotations

import torch
from shared_loop import Loop, net

module = net().bfloat16()
loop = Loop()
model = loop.spread(module)
masters = [p.detach().float() for p in module.parameters()]
optimizer = torch.optim.AdamW(masters, lr=1e-3)
state = loop.protect(model=model, optimizer=optimizer)

for step in loop.steps():
    loss = model(loop.batch(step).bfloat16()).float().pow(2).mean()
    loss.backward()
    loop.rest(1)
    for master, slim in zip(masters, module.parameters(), strict=True):
        master.grad = None if slim.grad is None else slim.grad.float()
    optimizer.step()
    loop.rest(2)
    with torch.no_grad():
        for master, slim in zip(masters, module.parameters(), strict=True):
            slim.copy_(master)
    module.zero_grad()
    state.commit(loss=loss)
    loop.rest(3)
loop.finish(model=module.state_dict(), optimizer=optimizer.state_dict(), masters=masters)

"""Changes within a step: a layer is frozen and thawed, batch norm and dropout are switched off."""

from __future__ import annotations

import torch
from shared_loop import Loop, net

FREEZE, THAW, DRY = 4, 30, 6

model = net()
loop = Loop()
replica = loop.spread(model, find_unused_parameters=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
state = loop.protect(model=model, optimizer=optimizer)


def dry() -> None:
    for each in model.modules():
        if isinstance(each, torch.nn.Dropout):
            each.p = 0.0


if state.step >= DRY:  # a rate is not a flag, so the script sets it again
    dry()
model.train()
for step in loop.steps():
    if step == FREEZE:
        model[0].requires_grad_(False)
        model[1].eval()
    if step == THAW:
        model[0].requires_grad_(True)
    if step == DRY:
        dry()
    loss = replica(loop.batch(step)).pow(2).mean()
    loop.rest(1)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    loop.rest(2)
    state.commit(loss=loss)
    loop.rest(3)
    if step % 10 == 0 and loop.session.rank == 0:  # one rank evaluates alone
        with torch.no_grad():
            model.eval()
            model(loop.batch(step))
            model.train()
            if step >= FREEZE:
                model[1].eval()
loop.finish(model=model.state_dict(), optimizer=optimizer.state_dict())

"""torch.compile, with a capturable-like optimizer whose learning rate is a tensor."""

from __future__ import annotations

import torch
from shared_loop import Loop
from torch import nn

module = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
loop = Loop()
model = torch.compile(loop.spread(module), backend="aot_eager")
optimizer = torch.optim.AdamW(module.parameters(), lr=torch.tensor(1e-3), foreach=False)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
state = loop.protect(model=model, optimizer=optimizer, scheduler=scheduler)

for step in loop.steps():
    loss = model(loop.batch(step)).pow(2).mean()
    loop.rest(1)
    loss.backward()
    optimizer.step()
    scheduler.step()
    loop.rest(2)
    optimizer.zero_grad()
    state.commit(loss=loss)
    loop.rest(3)
loop.finish(model=module.state_dict(), optimizer=optimizer.state_dict(), rate=scheduler.get_last_lr())

"""Two models, two optimizers, two backward passes in a step."""

from __future__ import annotations

import torch
from shared_loop import Loop, net
from torch.nn import functional

maker, judge = net(4, 16, 8), net(8, 16, 1)
loop = Loop()
makes, judges = loop.spread(maker), loop.spread(judge, broadcast_buffers=False)
slow = torch.optim.RMSprop(maker.parameters(), lr=1e-3)
quick = torch.optim.Adam(judge.parameters(), lr=1e-3, betas=(0.5, 0.9))
state = loop.protect(maker=makes, judge=judges, slow=slow, quick=quick)

for step in loop.steps():
    real, noise = loop.batch(step), torch.randn(6, 4)
    fake = makes(noise)
    lost = functional.softplus(judges(fake.detach())).mean() + functional.softplus(-judges(real)).mean()
    quick.zero_grad()
    lost.backward()
    loop.rest(1)
    quick.step()
    loop.rest(2)
    loss = functional.softplus(-judges(fake)).mean()
    slow.zero_grad()
    loss.backward()
    slow.step()
    state.commit(loss=loss)
    loop.rest(3)
loop.finish(
    maker=maker.state_dict(), judge=judge.state_dict(), slow=slow.state_dict(), quick=quick.state_dict()
)

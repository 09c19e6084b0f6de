"""Epochs over a stream that saves its position, gradients of three passes, a schedule by epochs."""

from __future__ import annotations

import torch
from shared_loop import Loop, net
from torch import Tensor
from torch.utils.data import IterableDataset

PARTS, PER_EPOCH = 3, 25


class Stream(IterableDataset[Tensor]):
    def __init__(self, rank: int) -> None:
        self.rank, self.drawn = rank, 0

    def __iter__(self):
        while True:
            self.drawn += 1
            yield torch.randn(5, 8, generator=torch.Generator().manual_seed(100 * self.drawn + self.rank))

    def state_dict(self) -> dict[str, int]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.drawn = state["drawn"]


module = net()
loop = Loop()
model = loop.spread(module)
optimizer = torch.optim.Adam(module.parameters(), lr=1e-2, amsgrad=True)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
stream = Stream(loop.session.rank)
state = loop.protect(model=model, optimizer=optimizer, scheduler=scheduler, data=stream)
given = iter(stream)

for epoch in range(state.step // PER_EPOCH, -(-loop.count // PER_EPOCH)):
    for step in loop.steps(min((epoch + 1) * PER_EPOCH, loop.count)):
        for part in range(PARTS):
            if part < PARTS - 1:
                with model.no_sync():
                    model(next(given)).pow(2).mean().backward()
            else:
                loss = model(next(given)).pow(2).mean()
                loop.rest(1)
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loop.rest(2)
        if step % PER_EPOCH == PER_EPOCH - 1:
            scheduler.step(float(epoch))  # belongs to the epoch's last step, so it precedes its commit
        state.commit(loss=loss)
        loop.rest(3)
loop.finish(
    model=module.state_dict(),
    optimizer=optimizer.state_dict(),
    scheduler=scheduler.state_dict(),
    drawn=stream.drawn,
)

"""A DataLoader with worker processes, new ones in each epoch or not: argv[4] is fork, spawn or persistent."""

from __future__ import annotations

import sys

import torch
from shared_loop import Loop, net
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

SIZE, BATCH = 240, 4


class Points(Dataset[Tensor]):
    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, at: int) -> Tensor:
        return torch.randn(8, generator=torch.Generator().manual_seed(at))


class Order:
    """The batches of one rank, starting at a step. Each epoch has a different order."""

    def __init__(self, rank: int, world_size: int, first: int) -> None:
        self.rank, self.world_size, self.first = rank, world_size, first
        self.per_epoch = SIZE // (BATCH * world_size)

    def __len__(self) -> int:
        return self.per_epoch - self.first % self.per_epoch

    def __iter__(self):
        epoch, begin = divmod(self.first, self.per_epoch)
        self.first = (epoch + 1) * self.per_epoch
        order = torch.randperm(SIZE, generator=torch.Generator().manual_seed(epoch)).tolist()
        for at in range(begin, self.per_epoch):
            start = (at * self.world_size + self.rank) * BATCH
            yield order[start : start + BATCH]


def main() -> None:
    kind = sys.argv[4]
    module = net()
    loop = Loop()
    model = loop.spread(module)
    optimizer = torch.optim.Adagrad(module.parameters(), lr=0.01)
    state = loop.protect(model=model, optimizer=optimizer)
    order = Order(loop.session.rank, loop.session.world_size, state.step)
    how = "spawn" if kind == "spawn" else "fork"
    loader = DataLoader(
        Points(),
        batch_sampler=order,
        num_workers=2 if kind != "spawn" else 1,
        multiprocessing_context=how,
        persistent_workers=kind != "fork",
        generator=torch.Generator(),  # otherwise each epoch draws its seed from the training's generator
    )
    while state.step < loop.count:
        end = (state.step // order.per_epoch + 1) * order.per_epoch
        for _, given in zip(loop.steps(min(end, loop.count)), loader, strict=False):
            loss = nn.functional.mse_loss(model(given), torch.ones(len(given), 4))
            loop.rest(1)
            loss.backward()
            optimizer.step()
            loop.rest(2)
            optimizer.zero_grad()
            state.commit(loss=loss)
            loop.rest(3)
    loop.finish(model=module.state_dict(), optimizer=optimizer.state_dict())


if __name__ == "__main__":
    main()

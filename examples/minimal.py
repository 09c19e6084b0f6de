"""A minimal script for holdfast: `holdfast run --nproc-per-node 2 -- python examples/minimal.py`."""

import torch
from torch.nn.parallel import DistributedDataParallel

import holdfast

torch.manual_seed(0)  # all ranks must build the same model; a warm process has already done this
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = holdfast.join()  # a warm process waits here until it is needed
replica = DistributedDataParallel(model.to(session.device))
torch.manual_seed(session.rank)
state = session.protect(model=model, optimizer=optimizer)  # also protects the random states
for step in state.steps(1000):  # continues where the group left off
    inputs = torch.randn(16, 8, device=session.device)
    loss = (replica(inputs) - inputs.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    state.commit(loss=loss)
    if step % 100 == 99 and session.rank == 0:
        print(f"step {step}  loss {loss.item():.3g}", flush=True)  # noqa: T201

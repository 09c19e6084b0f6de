"""The shortest script on holdfast: `holdfast run --nproc-per-node 2 -- python examples/minimal.py`."""

import torch
from torch.nn.parallel import DistributedDataParallel

import holdfast

torch.manual_seed(0)  # before join: all ranks build the same model, ahead of time
model = torch.nn.Linear(8, 1).to(holdfast.device())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = holdfast.join()  # a warm process waits here until it is needed
replica = DistributedDataParallel(model)
state = session.protect(model=model, optimizer=optimizer)
for step in state.steps(1000):  # goes on where the group left off
    inputs = torch.randn(16, 8, device=session.device)  # random states are kept, too
    loss = (replica(inputs) - inputs.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    state.commit(loss=loss)

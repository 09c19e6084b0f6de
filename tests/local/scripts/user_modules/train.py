"""Import modules that are named like parts of Holdfast."""

from __future__ import annotations

from torch import nn
from torch.optim import SGD

import holdfast
import sidecar
import trainer

session = holdfast.join()
model = nn.Linear(2, 2)
optimizer = SGD(model.parameters(), lr=0.1)
state = session.protect(model=model, optimizer=optimizer)
for _ in state.steps(3):
    optimizer.step()
    state.commit(loss=0.0)
print("trainer is", trainer.WHOSE, "and sidecar is", sidecar.WHOSE)

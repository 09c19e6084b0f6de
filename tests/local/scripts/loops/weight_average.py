"""An exponential average, swapped in for each evaluation; from step 15 on, a stochastic average as well.

With the word `alone`, only rank 0's evaluations take a while, and rank 1 waits for it in the next step.
"""

from __future__ import annotations

import copy
import sys
from contextlib import contextmanager
from pathlib import Path

import torch
from shared_loop import PLACES, Loop, net
from torch.optim import swa_utils

EVERY = 10
module = net()
loop = Loop()
model = loop.spread(module)
ema = copy.deepcopy(module).requires_grad_(False)
swa = swa_utils.AveragedModel(module)
optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
scheduler = swa_utils.SWALR(optimizer, swa_lr=0.01, anneal_epochs=50)
state = loop.protect(model=model, ema=ema, swa=swa, optimizer=optimizer, scheduler=scheduler)


@contextmanager
def averaged():
    """Swap the weights as averaging libraries do: through `.data`, which no version counter sees."""
    kept = [p.data.clone() for p in module.parameters()]
    for parameter, average in zip(module.parameters(), ema.parameters(), strict=True):
        parameter.data.copy_(average.data)
    module.eval()
    yield
    module.train()
    for parameter, old in zip(module.parameters(), kept, strict=True):
        parameter.data.copy_(old)


for step in loop.steps():
    loss = model(loop.batch(step)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    loop.rest(1)
    optimizer.step()
    scheduler.step()
    with torch.no_grad():
        for average, parameter in zip(ema.parameters(), module.parameters(), strict=True):
            average.lerp_(parameter, 0.1)
        for average, buffer in zip(ema.buffers(), module.buffers(), strict=True):
            average.copy_(buffer)
    if step >= 15:
        swa.update_parameters(module)
    loop.rest(2)
    state.commit(loss=loss)
    if step % EVERY == EVERY - 1:
        with state.pause("eval"), averaged(), torch.no_grad():
            model(loop.batch(step))
            Path(f"evaluating-{loop.session.rank}").write_text(str(step))
            if loop.session.rank == 0 or "alone" not in sys.argv:
                loop.rest(step % PLACES, 0.3)
            Path(f"evaluating-{loop.session.rank}").unlink(missing_ok=True)
loop.finish(
    model=module.state_dict(),
    ema=ema.state_dict(),
    swa=swa.state_dict(),
    optimizer=optimizer.state_dict(),
    scheduler=scheduler.last_epoch,
)

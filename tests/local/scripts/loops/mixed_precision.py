"""Mixed precision with a GradScaler. Every seventh step overflows. argv[4] is plain or fused."""

from __future__ import annotations

import sys

import torch
from shared_loop import Loop, net

module = net()
loop = Loop()
model = loop.spread(module)
optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, fused=sys.argv[4] == "fused")
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=5)
state = loop.protect(model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler)

for step in loop.steps():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(loop.batch(step)).float().pow(2).mean()
    scaler.scale(loss * (float("inf") if step % 7 == 3 else 1.0)).backward()
    loop.rest(1)
    scaler.step(optimizer)
    scaler.update()
    loop.rest(2)
    scheduler.step()
    optimizer.zero_grad()
    state.commit(loss=loss)
    loop.rest(3)
loop.finish(
    model=module.state_dict(),
    optimizer=optimizer.state_dict(),
    scheduler=scheduler.last_epoch,
    scaler=scaler.state_dict(),
)

"""A script that does not use holdfast and has no optimizer step: python SCRIPT SECONDS.

Rank 0 prepares data for SECONDS while the others wait for it. Then all ranks predict for SECONDS.
"""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist
from torch import nn

seconds = float(sys.argv[1])
dist.init_process_group("gloo")
end_s = time.monotonic() + seconds
while dist.get_rank() == 0 and time.monotonic() < end_s:
    sorted(str(number) for number in range(20_000))
dist.barrier()
model = nn.Linear(64, 64)
end_s = time.monotonic() + seconds
with torch.no_grad():
    while time.monotonic() < end_s:
        model(torch.randn(16, 64))
        time.sleep(0.01)
dist.barrier()
dist.destroy_process_group()
print("predicted", flush=True)

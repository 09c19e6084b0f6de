"""Train for several epochs over a dataset, and evaluate and save the model after each epoch.

Run it with `holdfast run --nproc-per-node 2 -- python examples/epochs.py 50` (50 epochs; the default is 5).
While it runs, kill a rank with `holdfast inject kill --rank 1`. The results are the same as without the kill.
"""

import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

import holdfast

EPOCHS = int(sys.argv[1]) if len(sys.argv) > 1 else 5
BATCH = 32


class Circles(Dataset):
    """Points labelled by whether they lie inside a circle. Each access adds random jitter to the point."""

    def __init__(self, size: int, seed: int, jitter: float = 0.02) -> None:
        self.points = torch.rand(size, 2, generator=torch.Generator().manual_seed(seed)) * 2 - 1
        self.labels = (self.points.square().sum(1) < 0.5).float()
        self.jitter = jitter

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.points[index] + self.jitter * torch.randn(2), self.labels[index]


def evaluate(model: nn.Module, data: Circles) -> float:
    with torch.no_grad():
        return ((model(data.points)[:, 0] > 0) == (data.labels > 0)).float().mean().item()


def save(model: nn.Module, path: Path) -> None:
    """Save the model atomically: if this process is killed, the file is either complete or unchanged."""
    torch.save(model.state_dict(), scratch := path.with_suffix(".new"))
    os.replace(scratch, path)


def main() -> None:
    torch.manual_seed(0)  # the same weights on all ranks
    model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    train, test = Circles(20_000, seed=1), Circles(2_000, seed=2, jitter=0.0)

    session = holdfast.join()  # a warm process waits here
    replica = DistributedDataParallel(model.to(session.device))
    torch.manual_seed(session.rank)
    state = session.protect(model=replica, optimizer=optimizer)
    batches = holdfast.Batches(train, BATCH, session, state, num_workers=2)

    for step, (points, labels) in batches.steps(EPOCHS * len(batches)):  # continues where the group left off
        outputs = replica(points.to(session.device))[:, 0]
        loss = nn.functional.binary_cross_entropy_with_logits(outputs, labels.to(session.device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state.commit(loss=loss, position=batches.position(step))
        if batches.ends_epoch(step) and session.rank == 0:
            with state.pause("eval", limit_s=600):  # so that Holdfast does not treat this as a hang
                right = evaluate(model, test)
                save(model, Path("model.pt"))
            print(f"epoch {batches.epoch(step)}  loss {loss.item():.4f}  accuracy {right:.3f}", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()

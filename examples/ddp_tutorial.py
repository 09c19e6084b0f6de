"""An ordinary DDP script for torchrun. It does not import holdfast, and writes its own checkpoint.

    torchrun --nproc-per-node 2 examples/ddp_tutorial.py --steps 200 --fake-data
    holdfast run --nproc-per-node 2 -- python examples/ddp_tutorial.py --steps 200 --fake-data

With `--checkpoint FILE`, it saves its state every `--save-every` steps, and resumes from that file when it
starts again. The file is a NumPy archive, so reading it cannot run code.
"""

import argparse
import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset


def build(channels: int) -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Conv2d(channels, 16, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.Conv2d(16, 32, 3, stride=2, padding=1),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(32 * 4 * 4, 10),
    )


def make_data(fake: bool) -> TensorDataset:
    """Return 8x8 images and labels: scikit-learn's digits, or ten random patterns with noise."""
    if fake:
        generator = torch.Generator().manual_seed(0)
        labels = torch.randint(10, (2048,), generator=generator)
        patterns = torch.randn(10, 3, 8, 8, generator=generator)
        noise = torch.randn(2048, 3, 8, 8, generator=generator)
        return TensorDataset(patterns[labels] + noise, labels)
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    return TensorDataset(images, torch.tensor(labels))


def save(path: Path, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Replace the checkpoint atomically, so that it is complete even if this process is killed."""
    arrays = {f"model.{name}": tensor.cpu().numpy() for name, tensor in model.state_dict().items()}
    for index, state in optimizer.state_dict()["state"].items():
        arrays[f"momentum.{index}"] = state["momentum_buffer"].cpu().numpy()
    scratch = path.with_name(f".{path.name}.new")
    with scratch.open("wb") as file:
        np.savez(file, step=step, **arrays)
        file.flush()
        os.fsync(file.fileno())
    scratch.replace(path)


def load(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Restore the state from the checkpoint; return the number of completed steps."""
    with np.load(path, allow_pickle=False) as arrays:
        weights = {name: torch.from_numpy(arrays[f"model.{name}"]) for name in model.state_dict()}
        model.load_state_dict(weights)
        whole = optimizer.state_dict()
        for index in whole["param_groups"][0]["params"]:
            momentum = torch.from_numpy(arrays[f"momentum.{index}"])
            whole["state"][index] = {"momentum_buffer": momentum}
        optimizer.load_state_dict(whole)
        return int(arrays["step"])


def train(args: argparse.Namespace, device: torch.device) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    data = make_data(args.fake_data)
    model = build(data[0][0].shape[0]).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    start = 0
    if args.checkpoint is not None and args.checkpoint.exists():
        start = load(args.checkpoint, model, optimizer)
    replica = DistributedDataParallel(model)

    for step in range(start, args.steps):
        generator = torch.Generator().manual_seed(step)  # all ranks draw the same order
        chosen = torch.randperm(len(data), generator=generator)[: args.batch_size * world_size]
        images, labels = data[chosen[rank::world_size]]  # each rank takes its share
        loss = cross_entropy(replica(images.to(device)), labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            if args.log_every and (step % args.log_every == 0 or step == args.steps - 1):
                print(f"step {step} loss {loss.item():.4f}", flush=True)  # noqa: T201
            if args.checkpoint is not None and (step + 1) % args.save_every == 0:
                save(args.checkpoint, step + 1, model, optimizer)


def main() -> None:
    parser = argparse.ArgumentParser(description="simple distributed training job")
    parser.add_argument("--steps", type=int, default=200, help="total number of optimizer steps")
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step")
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate")
    parser.add_argument("--fake-data", action="store_true", help="generate images; needs no scikit-learn")
    parser.add_argument("--checkpoint", type=Path, metavar="FILE", help="file to resume from and save to")
    parser.add_argument("--save-every", type=int, default=20, help="steps between saves")
    parser.add_argument("--log-every", type=int, default=10, help="steps between log lines; 0: no lines")
    args = parser.parse_args()

    if torch.cuda.is_available():
        dist.init_process_group("nccl")
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    else:
        dist.init_process_group("gloo")
        device = torch.device("cpu")
    train(args, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

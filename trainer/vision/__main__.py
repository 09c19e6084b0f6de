"""Train the ResNet: `python -m trainer.vision`, alone, under torchrun, or under `holdfast run`.

All work that does not need a rank comes before `holdfast.join()`, where a warm process does it in advance.
"""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the usual name for it
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import holdfast
from trainer import digest
from trainer.group import leave, settle
from trainer.log import Log
from trainer.options import BadValue
from trainer.pace import Pace
from trainer.passes import accumulate, autocast
from trainer.rehearsal import rehearse
from trainer.repeatable import deterministic, seed_everything
from trainer.sampler import Sampler
from trainer.schedule import warmup_cosine
from trainer.vision.images import CLASSES, Images, digits, fake, shifted, split
from trainer.vision.model import ResNet
from trainer.vision.options import VisionOptions, make_parser, read

MOMENTUM = 0.9
WEIGHT_DECAY = 5e-4
VALIDATION_BATCH = 256


def main() -> None:
    parser = make_parser()
    options = read(parser, sys.argv[1:])
    try:
        made = options.fake_data
        images = fake(options.images, options.image_size, options.seed) if made else digits()
    except BadValue as error:
        parser.error(str(error))
    deterministic()
    torch.manual_seed(options.seed)  # the same weights on all ranks
    model = ResNet(
        channels=images.pixels.shape[1],
        classes=CLASSES,
        blocks=options.blocks,
        width=options.width,
        dropout=options.dropout,
    )
    optimizer = torch.optim.SGD(
        model.parameters(), lr=options.lr, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY
    )
    train(options, images, model, optimizer)
    leave()


def train(options: VisionOptions, images: Images, model: ResNet, optimizer: torch.optim.Optimizer) -> None:
    learned, validated = split(images)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_cosine(options.warmup, options.steps))
    flops = model.flops_per_image(images.pixels[0])
    first = torch.arange(min(options.batch, len(learned)))
    rehearse(model, lambda copied: loss_on(copied, learned, first, holdfast.device(), options.bf16))
    session = holdfast.join()
    device, rank, ranks = session.device, session.rank, session.world_size
    model.to(device)
    gpu = [device.index] if device.type == "cuda" else None
    # Before each forward pass, DDP broadcasts the batch norm statistics of rank 0 to all ranks.
    replica = DistributedDataParallel(model, device_ids=gpu, gradient_as_bucket_view=True)
    settle(replica, images.pixels[:1].to(device))
    sampler = Sampler(
        len(learned),
        options.batch,
        rank=rank,
        world_size=ranks,
        seed=options.seed,
        accumulate=options.accumulate,
    )
    seed_everything(options.seed, rank)  # shifts and dropout differ from rank to rank
    state = session.protect(model=model, optimizer=optimizer, scheduler=scheduler, data=sampler)

    log = Log(rank=rank, every=options.log_every, steps=options.steps, unit="images")
    pace = Pace(options.pace)
    for step in state.steps(options.steps):
        time.sleep(pace.left_s(time.monotonic()))
        lr = float(scheduler.get_last_lr()[0])
        loss = accumulate(
            replica,
            sampler.batch(step),
            lambda chosen: loss_on(replica, learned, chosen, device, options.bf16),
        )
        norm = nn.utils.clip_grad_norm_(model.parameters(), options.clip)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        state.commit(
            loss=loss,
            grad_norm=norm,
            samples=sampler.step_size,
            flops=sampler.step_size * flops,
            position=sampler.first(step),
        )
        log.step(step, loss=loss, norm=norm, lr=lr, done=sampler.step_size)
        if options.val_every and (step + 1) % options.val_every == 0:
            with state.pause("eval"), log.aside():
                loss_now, right = validate(model, validated, options, device)
                log.say(f"step {step:5d}  val loss {loss_now:.4f}  right {right:.1%}")
    digest.report(model, optimizer, device, options.digest)


def loss_on(
    model: nn.Module, images: Images, chosen: Tensor, device: torch.device, bf16: bool | None
) -> Tensor:
    """Return the mean cross entropy on the chosen images, each randomly shifted by a few pixels."""
    pixels, labels = images.pick(chosen, device)
    with autocast(device, bf16):
        return F.cross_entropy(model(shifted(pixels)), labels)


@torch.no_grad()
def validate(
    model: ResNet, images: Images, options: VisionOptions, device: torch.device
) -> tuple[float, float]:
    """Return the mean loss and the accuracy on `images`. Each rank evaluates a part of them.

    This is a collective: all ranks must call it. It draws no random numbers and changes no state, so it does
    not affect later training.
    """
    mine = torch.arange(dist.get_rank(), len(images), dist.get_world_size())
    sums = torch.zeros(3, device=device)
    model.eval()  # not the replica, because its forward pass would change buffers
    for chosen in mine.split(VALIDATION_BATCH):
        pixels, labels = images.pick(chosen, device)
        with autocast(device, options.bf16):
            logits = model(pixels)
        loss = F.cross_entropy(logits, labels, reduction="sum")
        right = (logits.argmax(1) == labels).sum()
        sums += torch.stack([loss, right, torch.tensor(len(labels), device=device)])
    model.train()
    dist.all_reduce(sums)
    loss_sum, right_sum, count = sums.tolist()
    return loss_sum / count, right_sum / count


if __name__ == "__main__":
    main()

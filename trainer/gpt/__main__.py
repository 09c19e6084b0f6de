"""Train the GPT: `python -m trainer.gpt`, alone, under torchrun, or under `holdfast run`.

All work that does not need a rank comes before `holdfast.join()`, where a warm process does it in advance.
"""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

import holdfast
from trainer import digest
from trainer.gpt import corpus
from trainer.gpt.model import GPT, loss_of, weight_groups
from trainer.gpt.options import GptOptions, make_parser, read
from trainer.group import leave, settle
from trainer.log import Log
from trainer.options import BadValue
from trainer.pace import Pace
from trainer.passes import accumulate, autocast
from trainer.rehearsal import rehearse
from trainer.repeatable import deterministic, seed_everything
from trainer.sampler import Sampler
from trainer.schedule import warmup_cosine

WEIGHT_DECAY = 0.1
BETAS = (0.9, 0.95)


def main() -> None:
    parser = make_parser()
    options = read(parser, sys.argv[1:])
    try:
        text = corpus.load(options.data, context=options.context, max_bytes=options.max_bytes)
    except BadValue as error:
        parser.error(str(error))
    deterministic()
    torch.manual_seed(options.seed)  # the same weights on all ranks
    train(options, text, *build(options))
    leave()


def build(options: GptOptions) -> tuple[GPT, AdamW, LambdaLR]:
    """Return the model (still on the CPU), its optimizer, and its learning rate schedule."""
    model = GPT(
        layers=options.layers,
        heads=options.heads,
        width=options.width,
        context=options.context,
        dropout=options.dropout,
    )
    groups = weight_groups(model, WEIGHT_DECAY)
    optimizer = AdamW(groups, lr=options.lr, betas=BETAS, fused=True)
    return model, optimizer, LambdaLR(optimizer, warmup_cosine(options.warmup, options.steps))


def train(
    options: GptOptions, text: corpus.Corpus, model: GPT, optimizer: AdamW, scheduler: LambdaLR
) -> None:
    first = text.train[: options.batch]
    rehearse(model, lambda copied: loss_on(copied, first, holdfast.device(), options.bf16))
    session = holdfast.join()
    device, rank, ranks = session.device, session.rank, session.world_size
    model.to(device)
    gpu = [device.index] if device.type == "cuda" else None
    replica = DistributedDataParallel(model, device_ids=gpu, gradient_as_bucket_view=True)
    settle(replica, torch.zeros(1, 1, dtype=torch.long, device=device))
    sampler = Sampler(
        len(text.train),
        options.batch,
        rank=rank,
        world_size=ranks,
        seed=options.seed,
        accumulate=options.accumulate,
    )
    seed_everything(options.seed, rank)  # dropout differs from rank to rank
    state = session.protect(model=model, optimizer=optimizer, scheduler=scheduler, data=sampler)

    log = Log(rank=rank, every=options.log_every, steps=options.steps, unit="tokens")
    tokens = sampler.step_size * options.context  # the tokens of all ranks; a byte is a token
    pace = Pace(options.pace)
    for step in state.steps(options.steps):
        time.sleep(pace.left_s(time.monotonic()))
        lr = float(scheduler.get_last_lr()[0])
        loss = accumulate(
            replica,
            sampler.batch(step),
            lambda chosen: loss_on(replica, text.train[chosen], device, options.bf16),
        )
        norm = nn.utils.clip_grad_norm_(model.parameters(), options.clip)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        state.commit(
            loss=loss,
            grad_norm=norm,
            samples=sampler.step_size,
            tokens=tokens,
            flops=tokens * model.flops_per_token(),
            position=sampler.first(step),
        )
        log.step(step, loss=loss, norm=norm, lr=lr, done=tokens)
        if options.val_every and (step + 1) % options.val_every == 0:
            with state.pause("eval"), log.aside():
                result = validate(model, text.validation, options, device)
                log.say(f"step {step:5d}  val loss {result:.4f}")
    digest.report(model, optimizer, device, options.digest)


def loss_on(model: nn.Module, text: Tensor, device: torch.device, bf16: bool | None) -> Tensor:
    """Return the mean loss of predicting each byte of `text` but the first; shape (batch, context + 1)."""
    whole = text.to(device, torch.long)
    with autocast(device, bf16):
        return loss_of(model(whole[:, :-1]), whole[:, 1:])


@torch.no_grad()
def validate(model: GPT, text: Tensor, options: GptOptions, device: torch.device) -> float:
    """Return the mean loss on `--val-batches` batches spread evenly over `text`.

    This is a collective: all ranks must call it. It draws no random numbers and changes no state, so it does
    not affect later training.
    """
    count = min(len(text), options.val_batches * options.batch)
    chosen = text[:: len(text) // count][:count].split(options.batch)
    sums = torch.zeros(2, device=device)
    model.eval()
    for batch in chosen[dist.get_rank() :: dist.get_world_size()]:
        loss = loss_on(model, batch, device, options.bf16)
        sums += torch.stack([loss * len(batch), torch.tensor(len(batch), device=device)])
    model.train()
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


if __name__ == "__main__":
    main()

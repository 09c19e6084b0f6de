"""A training loop in a single file, as some users write it: python own_loop.py [--max_iters=N ...].

A small GPT on bytes, random batches from a memory-mapped file, gradient accumulation, a learning rate with
warm-up and cosine decay, and periodic evaluation and checkpoints by rank 0. It uses torchrun's variables
and nothing else. It resumes from `ckpt.pt` if there is one.
"""

import math
import os
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel

out_dir = "out"
eval_interval = 30
eval_iters = 4
batch_size = 8
block_size = 32
gradient_accumulation_steps = 4  # over all ranks
max_iters = 150
learning_rate = 3e-3
warmup_iters = 10
min_lr = 3e-4
grad_clip = 1.0
pace = 0.03  # minimum seconds per step
for word in sys.argv[1:]:
    name, value = word.removeprefix("--").split("=")
    assert name in globals(), name
    globals()[name] = type(globals()[name])(value)

ddp = int(os.environ.get("RANK", -1)) != -1
if ddp:
    init_process_group("gloo")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    master_process = rank == 0
    assert gradient_accumulation_steps % world_size == 0
    gradient_accumulation_steps //= world_size
else:
    rank, master_process = 0, True
os.makedirs(out_dir, exist_ok=True)
torch.manual_seed(1337 + rank)


def corpus():
    path = os.path.join(out_dir, "train.bin")
    if master_process and not os.path.exists(path):
        rng = np.random.default_rng(0)
        words = [rng.integers(0, 64, size=n).astype(np.uint8) for n in (3, 5, 7, 4)]
        text = np.concatenate([words[i] for i in rng.integers(0, len(words), size=4000)])
        text.tofile(path + ".part")
        os.replace(path + ".part", path)
    if ddp:
        torch.distributed.barrier()
    return np.memmap(path, dtype=np.uint8, mode="r")


def get_batch(data):
    starts = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([torch.from_numpy(data[i : i + block_size].astype(np.int64)) for i in starts])
    y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + block_size].astype(np.int64)) for i in starts])
    return x, y


@dataclass
class GPTConfig:
    vocab_size: int = 64
    n_embd: int = 32
    n_head: int = 2
    n_layer: int = 2


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(config.n_embd), nn.LayerNorm(config.n_embd)
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.proj = nn.Linear(config.n_embd, config.n_embd)
        self.mlp = nn.Sequential(
            nn.Linear(config.n_embd, 4 * config.n_embd),
            nn.GELU(),
            nn.Linear(4 * config.n_embd, config.n_embd),
        )
        self.n_head = config.n_head

    def forward(self, x):
        b, t, c = x.shape
        heads = (
            each.view(b, t, self.n_head, -1).transpose(1, 2) for each in self.qkv(self.ln_1(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(block_size, config.n_embd)
        self.blocks = nn.Sequential(*(Block(config) for _ in range(config.n_layer)))
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        logits = self.head(self.blocks(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    ratio = (it - warmup_iters) / max(1, max_iters - warmup_iters)
    return min_lr + 0.5 * (1 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


@torch.no_grad()
def estimate_loss(model, data):
    model.eval()
    losses = [model(*get_batch(data)).item() for _ in range(eval_iters)]
    model.train()
    return sum(losses) / len(losses)


data = corpus()
raw_model = GPT(GPTConfig())
optimizer = torch.optim.AdamW(raw_model.parameters(), lr=learning_rate, betas=(0.9, 0.95))
iter_num = 0
ckpt_path = os.path.join(out_dir, "ckpt.pt")
if os.path.exists(ckpt_path):
    checkpoint = torch.load(ckpt_path, map_location="cpu")
    raw_model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    iter_num = checkpoint["iter_num"]
    print(f"resuming from {out_dir} at iter {iter_num}")
model = DistributedDataParallel(raw_model) if ddp else raw_model

X, Y = get_batch(data)
t0 = time.time()
while True:
    for group in optimizer.param_groups:
        group["lr"] = get_lr(iter_num)
    if iter_num % eval_interval == 0 and master_process:
        loss = estimate_loss(raw_model, data)
        print(f"step {iter_num}: loss {loss:.4f}")
        checkpoint = {
            "model": raw_model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "iter_num": iter_num,
            "loss": loss,
        }
        torch.save(checkpoint, ckpt_path + ".part")
        os.replace(ckpt_path + ".part", ckpt_path)
    if iter_num >= max_iters:
        break
    for micro_step in range(gradient_accumulation_steps):
        last = micro_step == gradient_accumulation_steps - 1
        with nullcontext() if last or not ddp else model.no_sync():
            loss = model(X, Y) / gradient_accumulation_steps
            X, Y = get_batch(data)
            loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    time.sleep(max(0.0, pace - (time.time() - t0)))
    t0 = time.time()
    iter_num += 1

if ddp:
    destroy_process_group()

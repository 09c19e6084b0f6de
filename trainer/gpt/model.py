"""A decoder-only transformer that predicts bytes. Its layout is GPT-2's: pre-norm, learned positions."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name for it
from torch import Tensor, nn

BYTES = 256
INIT_STD = 0.02


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        # The attention has no dropout, because there is no fused CPU kernel with dropout, and without a fused
        # kernel a step would take 1.5 times as long.
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = self.out(y.transpose(1, 2).reshape(batch, length, width))
        return F.dropout(y, self.dropout, self.training)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        y: Tensor = self.mlp(self.norm2(x))
        return x + y


class GPT(nn.Module):
    """Predicts the next byte. Input: byte values, (batch, length). Output: logits, (batch, length, 256)."""

    def __init__(self, *, layers: int, heads: int, width: int, context: int, dropout: float) -> None:
        """Initialise the weights from torch's global random state, which the caller must have seeded."""
        super().__init__()
        self.embed = nn.Embedding(BYTES, width)
        self.position = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, BYTES, bias=False)
        self.apply(_initialise)
        for name, parameter in self.named_parameters():
            # These are the two projections in each layer that write to the residual stream.
            if name.endswith(("out.weight", "mlp.2.weight")):
                nn.init.normal_(parameter, std=INIT_STD / (2 * layers) ** 0.5)

    def forward(self, text: Tensor) -> Tensor:
        places = torch.arange(text.shape[1], device=text.device)
        x = self.dropout(self.embed(text) + self.position(places))
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits

    def flops_per_token(self) -> int:
        """Estimate the floating point operations of training on one token, including the backward pass.

        The estimate is 6 operations for each parameter outside of the embeddings (Kaplan et al. 2020,
        arXiv:2001.08361, section 2.1).
        """
        embeddings = self.embed.weight.numel() + self.position.weight.numel()
        return 6 * (sum(parameter.numel() for parameter in self.parameters()) - embeddings)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy in nats per byte."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def weight_groups(model: nn.Module, decay: float) -> list[dict[str, object]]:
    """Return the parameter groups for an optimizer. Only matrices have weight decay."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    return [
        {"params": matrices, "weight_decay": decay},
        {"params": vectors, "weight_decay": 0.0},
    ]


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=INIT_STD)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)

"""A residual network for small images (He et al. 2015, arXiv:1512.03385, section 4.2)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name for it
from torch import Tensor, nn

STAGES = 3
BACKWARD_AND_FORWARD = 3  # a backward pass takes twice as many operations as a forward pass


class Residual(nn.Module):
    """Two convolutions and a shortcut around them; if shapes differ, the shortcut is a 1x1 convolution."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.around: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.around = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.around(x))


class ResNet(nn.Module):
    """Classifies images. Input: (batch, channels, height, width). Output: logits, (batch, classes)."""

    def __init__(self, *, channels: int, classes: int, blocks: int, width: int, dropout: float) -> None:
        """Initialise the weights from torch's global random state, which the caller must have seeded."""
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        self.stages = nn.Sequential(*_residuals(blocks, width))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width << (STAGES - 1), classes)

    def forward(self, x: Tensor) -> Tensor:
        features = self.stages(self.stem(x)).mean((2, 3))
        logits: Tensor = self.head(self.dropout(features))
        return logits

    @torch.no_grad()
    def flops_per_image(self, image: Tensor) -> int:
        """Return the floating point operations of training on one image, in the convolutions and the head."""
        counts: list[int] = []

        def count(module: nn.Module, _: object, y: Tensor) -> None:
            weight = module.get_parameter("weight")
            counts.append(2 * weight.numel() * (y.shape[-1] * y.shape[-2] if y.dim() == 4 else 1))

        kinds = (nn.Conv2d, nn.Linear)
        hooks = [m.register_forward_hook(count) for m in self.modules() if isinstance(m, kinds)]
        self.eval()
        self(image.unsqueeze(0))
        self.train()
        for hook in hooks:
            hook.remove()
        return BACKWARD_AND_FORWARD * sum(counts)


def _residuals(blocks: int, width: int) -> Iterator[Residual]:
    """Yield the blocks of three stages. Each later stage halves the image and doubles the channels."""
    channels_in = width
    for stage in range(STAGES):
        channels = width << stage
        for block in range(blocks):
            yield Residual(channels_in, channels, stride=2 if stage and block == 0 else 1)
            channels_in = channels

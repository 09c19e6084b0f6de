"""Load or generate the images to train on: scikit-learn's digits, or noisy random patterns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name for it
from torch import Tensor

from trainer.options import BadValue

CLASSES = 10
VALIDATION_SHARE = 8  # every 8th image is reserved for validation
FAKE_CHANNELS = 3
FAKE_NOISE = 1.0
SHIFT = 1  # the maximum shift in each direction, in pixels


@dataclass(frozen=True, slots=True)
class Images:
    """Images and their labels, which are from 0 to 9.

    `pixels` has the shape (count, channels, height, width) and values from about -1 to 1.
    """

    pixels: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def pick(self, chosen: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        return self.pixels[chosen].to(device), self.labels[chosen].to(device)


def digits() -> Images:
    """Return the 1797 digits that scikit-learn includes, with 8 by 8 pixels and one channel.

    Raises `BadValue` if scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise BadValue(
            "the digits are part of scikit-learn, which is not installed:"
            " pip install scikit-learn, or use --fake-data"
        ) from error
    data, labels = load_digits(return_X_y=True)
    pixels = torch.from_numpy(data).float().view(-1, 1, 8, 8) / 8 - 1
    return Images(pixels, torch.from_numpy(labels).long())


def fake(count: int, size: int, seed: int) -> Images:
    """Generate `count` colour images. Each is the random pattern of its class plus the same amount of noise.

    The result depends only on the arguments.
    """
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    patterns = torch.randn(CLASSES, FAKE_CHANNELS, size, size, generator=generator)
    noise = torch.randn(count, FAKE_CHANNELS, size, size, generator=generator)
    return Images((patterns[labels] + FAKE_NOISE * noise) / 2, labels)


def split(images: Images) -> tuple[Images, Images]:
    """Return the images for training and the images for validation."""
    aside = torch.arange(len(images)) % VALIDATION_SHARE == VALIDATION_SHARE - 1
    return (
        Images(images.pixels[~aside], images.labels[~aside]),
        Images(images.pixels[aside], images.labels[aside]),
    )


def shifted(pixels: Tensor) -> Tensor:
    """Return the images, each randomly shifted by up to `SHIFT` pixels, to make each epoch different.

    The shifts are always drawn from torch's CPU generator, even if the images are on a GPU.
    """
    height, width = pixels.shape[2:]
    padded = F.pad(pixels, (SHIFT,) * 4)
    moves = torch.randint(2 * SHIFT + 1, (len(pixels), 2)).tolist()
    views = [
        image[:, down : down + height, right : right + width]
        for image, (down, right) in zip(padded, moves, strict=True)
    ]
    return torch.stack(views)

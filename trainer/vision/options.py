"""Define the command line of `python -m trainer.vision`."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.options import Parser, number, whole

TINY: dict[str, Any] = {"blocks": 1, "width": 4, "batch": 8, "images": 256, "image_size": 8}


@dataclass(frozen=True, slots=True)
class VisionOptions:
    blocks: int  # residual blocks in each of three stages
    width: int  # channels in the first stage
    dropout: float
    fake_data: bool
    images: int  # the number of images to generate
    image_size: int  # height and width in pixels
    steps: int
    batch: int
    accumulate: int
    lr: float
    warmup: int
    clip: float
    seed: int
    val_every: int
    log_every: int
    pace: float  # seconds
    bf16: bool | None  # None means only if the device is a GPU that supports it
    digest: Path | None
    tiny: bool


def make_parser() -> Parser:
    description = "Train a small ResNet on scikit-learn's 8x8 digits, or on generated images."
    parser = Parser("trainer.vision", description, TINY)
    parser.set_defaults(batch=64, lr=0.1)
    add = parser.add_argument
    add("--blocks", metavar="N", type=whole(1), default=3, help="residual blocks in each of three stages")
    add("--width", metavar="N", type=whole(1), default=16, help="channels in the first stage")
    add("--dropout", metavar="X", type=number(0.0, below=1.0), default=0.1, help="share of features dropped")
    add("--fake-data", action="store_true", help="generate colour images instead of using the digits")
    add(
        "--images",
        metavar="N",
        type=whole(32),
        default=2048,
        help="number of images that --fake-data generates",
    )
    add(
        "--image-size",
        metavar="N",
        type=whole(4),
        default=16,
        help="height and width of generated images in pixels",
    )
    return parser


def read(parser: Parser, argv: list[str]) -> VisionOptions:
    """Return the options in `argv`. If they are invalid, print one line and exit with code 2."""
    found: argparse.Namespace = parser.read(argv)
    return VisionOptions(**vars(found))

"""Define the command line of `python -m trainer.gpt`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.options import Parser, number, whole

TINY: dict[str, Any] = {
    "layers": 2, "heads": 2, "width": 32, "context": 32, "batch": 4, "accumulate": 1,
    "max_bytes": 1 << 20, "val_batches": 2,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GptOptions:
    layers: int
    heads: int
    width: int
    context: int  # the number of bytes that a prediction can use
    dropout: float
    data: Path | None  # None means the standard library's sources
    max_bytes: int
    val_batches: int
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
    parser = Parser("trainer.gpt", "Train a small GPT on the bytes of text files.", TINY)
    parser.set_defaults(batch=4, accumulate=2)
    add = parser.add_argument
    add("--layers", metavar="N", type=whole(1), default=3, help="transformer blocks")
    add("--heads", metavar="N", type=whole(1), default=4, help="attention heads; must divide --width")
    add("--width", metavar="N", type=whole(1), default=128, help="features per byte")
    add("--context", metavar="N", type=whole(2), default=128, help="bytes in a sample")
    add("--dropout", metavar="X", type=number(0.0, below=1.0), default=0.1, help="share of features dropped")
    add(
        "--data",
        type=Path,
        metavar="DIR",
        help="train on the files in this directory (default: the standard library's source files)",
    )
    add("--max-bytes", metavar="N", type=whole(1), default=8 << 20, help="maximum bytes of text to read")
    add("--val-batches", metavar="N", type=whole(1), default=8, help="batches per validation, over all ranks")
    return parser


def read(parser: Parser, argv: list[str]) -> GptOptions:
    """Return the options in `argv`. If they are invalid, print one line and exit with code 2."""
    options = GptOptions(**vars(parser.read(argv)))
    if options.width % options.heads:
        parser.error(f"--heads: {options.heads} does not divide --width {options.width}")
    return options

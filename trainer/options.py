"""Parse the options that both trainers accept, and report a mistake in one line."""

from __future__ import annotations

import argparse
import difflib
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

# If the digest file has this name, print the digests, because a pod's files no longer exist after it ends.
PRINTED = Path("-")


class BadValue(ValueError):
    """An option has an invalid value. The message names the option, its value, and what is accepted."""


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Adds the defaults to the help, except None and False."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False:
            return action.help
        return super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """Refuses a bad command line with one line on stderr and exit code 2."""

    def __init__(self, prog: str, description: str, tiny: dict[str, Any]) -> None:
        """Define the common options. `tiny` contains the defaults that apply with `--tiny`."""
        super().__init__(
            prog=prog,
            usage=f"python -m {prog} [options]",
            description=description,
            allow_abbrev=False,
            formatter_class=_Help,
        )
        self._tiny = tiny
        add = self.add_argument
        add("--tiny", action="store_true", help="use a tiny model with steps of a few ms, for drills")
        add("--steps", metavar="N", type=whole(0), default=200, help="total number of optimizer steps")
        add("--batch", metavar="N", type=whole(1), default=8, help="samples per rank and backward pass")
        add("--accumulate", metavar="N", type=whole(1), default=1, help="backward passes per optimizer step")
        add(
            "--lr",
            metavar="X",
            type=number(0.0, above=True),
            default=1e-3,
            help="learning rate after warm-up",
        )
        add("--warmup", metavar="N", type=whole(0), default=20, help="steps of linear warm-up")
        add("--clip", metavar="X", type=number(0.0, above=True), default=1.0, help="maximum gradient norm")
        add("--seed", metavar="N", type=whole(0), default=0, help="seed of weights, data order and dropout")
        add("--val-every", metavar="N", type=whole(0), default=50, help="steps between validations; 0: never")
        add("--log-every", metavar="N", type=whole(0), default=10, help="steps between log lines; 0: none")
        add(
            "--pace",
            metavar="S",
            type=number(0.0),
            default=0.0,
            help="minimum seconds per step, for drills",
        )
        add(
            "--bf16",
            action=argparse.BooleanOptionalAction,
            default=None,
            help="autocast to bfloat16 (default: on a GPU that supports it)",
        )
        add(
            "--digest",
            type=Path,
            metavar="FILE",
            help="file for a JSON digest of each rank's final state; -: print it",
        )

    def read(self, argv: Sequence[str]) -> argparse.Namespace:
        """Return the options in `argv`; exit with code 2 if one of them is invalid."""
        if "--tiny" in argv:
            self.set_defaults(**self._tiny)
        options, unknown = self.parse_known_args(argv)
        if unknown:
            self.error(self._unknown(unknown[0]))
        is_file = options.digest not in (None, PRINTED)
        if is_file and not os.access(options.digest.parent, os.W_OK):
            self.error(f"--digest: {options.digest.parent} is not a writable directory")
        return options

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")

    def _unknown(self, given: str) -> str:
        known = list(self._option_string_actions)
        near = difflib.get_close_matches(given.split("=")[0], known, n=1, cutoff=0.8)
        hint = f"did you mean {near[0]}?" if near else "--help lists the options"
        return f"unknown option {given}; {hint}"


def whole(low: int) -> Callable[[str], int]:
    """Return an argparse type that accepts whole numbers of at least `low`."""

    def parse(text: str) -> int:
        wanted = argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {low}")
        try:
            value = int(text)
        except ValueError:
            raise wanted from None
        if value < low:
            raise wanted
        return value

    return parse


def number(low: float, *, above: bool = False, below: float = math.inf) -> Callable[[str], float]:
    """Return an argparse type that accepts finite numbers of at least `low` and below `below`.

    With `above`, `low` itself is not accepted.
    """

    def parse(text: str) -> float:
        words = f"a number {'above' if above else 'of at least'} {low:g}"
        if below != math.inf:
            words += f" and below {below:g}"
        wanted = argparse.ArgumentTypeError(f"{text!r} is not {words}")
        try:
            value = float(text)
        except ValueError:
            raise wanted from None
        if not low <= value < below or (above and value == low):  # the comparison is also false for NaN
            raise wanted
        return value

    return parse

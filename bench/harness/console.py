"""The benches' command-line parsers and their output."""

from __future__ import annotations

import argparse
import sys


class _Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keep the description as written; show the default of each option."""


def make_parser(name: str, about: str, examples: str = "") -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        f"python -m bench {name}",
        description=about,
        epilog=examples,
        formatter_class=_Formatter,
        allow_abbrev=False,
    )


def say(text: str = "") -> None:
    """Print one or more lines and flush, so that progress also shows in a pipe."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()

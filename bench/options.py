"""Command lines of the benches: the help shows what is measured, and defaults."""

from __future__ import annotations

import argparse


class _Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Text as it is written, and the default of each option."""


def make_parser(name: str, about: str, examples: str = "") -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        f"python -m bench {name}",
        description=about,
        epilog=examples,
        formatter_class=_Formatter,
        allow_abbrev=False,
    )

"""Fail on rank 1 in step 7, every time: python buggy.py raise|exit|print."""

from __future__ import annotations

import sys

from tiny import train


class OutOfOrder(Exception):
    """What a bug in a script looks like."""


def before_commit(step: int, rank: int) -> None:
    if step != 7 or rank != 1:
        return
    if sys.argv[1] == "raise":
        raise OutOfOrder(f"step {step} never works")
    sys.exit(3)


train(50, before_commit=before_commit)

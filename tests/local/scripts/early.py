"""Ends before it joins, as with --help: python early.py CODE."""

from __future__ import annotations

import sys

import holdfast

print("usage: early.py CODE; holdfast is at", holdfast.__name__)
sys.exit(int(sys.argv[1]))

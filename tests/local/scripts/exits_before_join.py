"""Exit before joining, as with --help: python exits_before_join.py CODE."""

from __future__ import annotations

import sys

import holdfast

print("usage: exits_before_join.py CODE; holdfast is at", holdfast.__name__)
sys.exit(int(sys.argv[1]))

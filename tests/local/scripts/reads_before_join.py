"""Read a file before joining, as a script loads its data: python reads_before_join.py FILE."""

from __future__ import annotations

import sys
from pathlib import Path

from tiny_model import train

Path(sys.argv[1]).read_text()
train(10_000_000)

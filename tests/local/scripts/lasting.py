"""Rank 0 has something to do after the loop, the first time for ever: python lasting.py STEPS MARKER."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

from tiny import once, train

train(int(sys.argv[1]))
if os.environ["RANK"] == "0" and once(Path(sys.argv[2])):
    threading.Event().wait()

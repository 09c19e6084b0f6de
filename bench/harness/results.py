"""Store all figures of a measurement in one JSON file, with a description of the machine."""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import time
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from bench.harness.console import say

ROOT = Path(__file__).resolve().parents[2]  # the checkout; benches run there
FOLDER = ROOT / "bench-results"
BUSY = 0.25  # above this load per core at the start, other work disturbs the measurement


def machine() -> dict[str, Any]:
    """Return a description of this machine, the installed software and the current load."""
    return {
        "cores": os.cpu_count(),
        "cpu": _cpu(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "commit": _commit(),
        "load": list(os.getloadavg()),
    }


def begin(name: str) -> dict[str, Any]:
    """Print a description of the machine, and return the first fields of the result."""
    found = machine()
    load, cores = found["load"][0], found["cores"] or 1
    say(
        f"{name}: {cores} cores ({found['cpu']}), torch {found['torch']}, "
        f"Python {found['python']}, load {load:.2f}"
    )
    if load > BUSY * cores:
        say(f"WARNING: the machine is busy (load {load:.2f} on {cores} cores): expect noise")
    now = datetime.now(timezone.utc)
    return {"bench": name, "started": now.isoformat(timespec="seconds"), "machine": found}


def write(found: dict[str, Any]) -> Path:
    """Write a result to a new file, print its path and return it."""
    FOLDER.mkdir(exist_ok=True)
    found["load_at_end"] = list(os.getloadavg())
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    path = FOLDER / f"{found['bench']}-{stamp}.json"
    path.write_text(json.dumps(plain(found), indent=1) + "\n")
    say(f"all figures: {path.relative_to(ROOT)}")
    return path


def plain(value: Any) -> Any:
    """Return `value` in a form that JSON can store: None for NaN and infinity, strings for paths."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return value


def _cpu() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in text.splitlines() if "model name" in line]
    return names[0] if names else platform.machine()


def _commit() -> str:
    asked = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()

"""How many GPUs could the ranks use, found out without importing torch or starting CUDA?"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path

from holdfast.process import gpu_assignment
from holdfast.protocol import environment

_NODE = re.compile(r"nvidia\d+")
_NO_CUDA = re.compile(r"^cuda\b.*=\s*None\s*$", re.MULTILINE)


def gpus(
    given: Mapping[str, str],
    dev: Path = Path("/dev"),
    driver: Path = Path("/proc/driver/nvidia/gpus"),
) -> int | None:
    """Return how many GPUs a process with the environment `given` would see; None when there are none.

    Device nodes are counted before the driver's list: a container has nodes for its own GPUs only.
    """
    present = _count(dev, _NODE) or _count(driver, re.compile(r".+"))
    if not present:
        return None
    chosen = given.get(gpu_assignment.VISIBLE)
    return present if chosen is None else _chosen(chosen, present)


def _count(directory: Path, name: re.Pattern[str]) -> int:
    try:
        return sum(1 for path in directory.iterdir() if name.fullmatch(path.name))
    except OSError:
        return 0


def _chosen(text: str, present: int) -> int:
    """Count as CUDA does: up to the first entry that names no device."""
    seen: list[str] = []
    for word in (each.strip() for each in text.split(",")):
        by_number = word.isdecimal() and int(word) < present
        if word in seen or not (by_number or word.startswith(("GPU-", "MIG-"))):
            break
        seen.append(word)
    return len(seen)


def dealt_out(given: Mapping[str, str], present: int | None) -> dict[str, str]:
    """Return the variables that let launchers deal out the machine's devices to their ranks.

    A member has the devices of the ranks that it is given: a standby none until it takes a lost member's
    ranks, and then that one's. Nothing when there is no device.
    """
    if not present:
        return {}
    chosen = given.get(gpu_assignment.VISIBLE)
    words = [str(n) for n in range(present)] if chosen is None else chosen.split(",")[:present]
    checked, how = gpu_assignment.WITHOUT_CUDA
    return {environment.DEVICES: ",".join(word.strip() for word in words), checked: how}


def torch_uses_cuda() -> bool:
    """Say whether the torch that this interpreter would import was built for CUDA."""
    try:
        spec = importlib.util.find_spec("torch")
    except (ImportError, ValueError):
        return False
    if spec is None or not spec.origin:
        return False
    try:
        text = Path(spec.origin).with_name("version.py").read_text(errors="replace")
    except OSError:
        return True
    return _NO_CUDA.search(text) is None

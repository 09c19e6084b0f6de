"""Count the GPUs that the ranks can use, without importing torch or initializing CUDA."""

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
    """Return how many GPUs a process with the environment `given` would see; None if the machine has none.

    Device nodes take precedence over the driver's list, because a container has only the nodes of its own
    GPUs.
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
    """Count the devices in `text`. Like CUDA, stop at the first invalid or repeated entry."""
    seen: list[str] = []
    for word in (each.strip() for each in text.split(",")):
        by_number = word.isdecimal() and int(word) < present
        if word in seen or not (by_number or word.startswith(("GPU-", "MIG-"))):
            break
        seen.append(word)
    return len(seen)


def device_environment(given: Mapping[str, str], present: int | None) -> dict[str, str]:
    """Return the environment variables that let launchers divide the machine's devices among the ranks.

    Devices belong to ranks. A standby has no devices until it takes over the ranks of a lost member together
    with their devices. Returns an empty mapping if there is no device.
    """
    if not present:
        return {}
    chosen = given.get(gpu_assignment.VISIBLE)
    words = [str(n) for n in range(present)] if chosen is None else chosen.split(",")[:present]
    checked, how = gpu_assignment.WITHOUT_CUDA
    return {environment.DEVICES: ",".join(word.strip() for word in words), checked: how}


def torch_uses_cuda() -> bool:
    """True unless the torch that this interpreter would import is missing or was built without CUDA."""
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

"""The fake library in this process, for tests that call a sensor directly."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nodeagent.nvml import library
from nodeagent.sensing.clock import Anchor, Clock
from tests.fakenvml.build import build
from tests.fakenvml.state import VARIABLE, Fake


class SetClock(Clock):
    """A clock that changes only when it is set."""

    def __init__(self, at_s: float = 1000.0) -> None:
        super().__init__(Anchor("a boot", 0.0))
        self.at_s = at_s

    def now_s(self) -> float:
        return self.at_s


@contextmanager
def faked(path: Path, gpus: int = 8, links: int = 18) -> Iterator[Fake]:
    """Load the fake library as `libnvidia-ml.so.1` for all callers in this process, with its state in `path`.

    The loader finds a library that is already loaded by its name, so pynvml needs no change. At the end of
    the context NVML must be closed again.
    """
    ctypes.CDLL(str(build()), ctypes.RTLD_GLOBAL)
    before = os.environ.get(VARIABLE)
    fake = Fake(path, gpus, links)
    os.environ[VARIABLE] = str(path)
    try:
        yield fake
        assert fake.state.attached == 0, "NVML was left open"
        assert fake.state.event_sets == 0, "an event set was not freed"
    finally:
        library.unload()
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before
        fake.close()


def bus(sysfs: Path, fake: Fake) -> Path:
    """Create a sysfs with the GPUs of a fake, bound to the module of its driver. Returns `sysfs`."""
    driver = sysfs / "bus/pci/drivers/nvidia"
    driver.mkdir(parents=True)
    for number in range(fake.state.gpus):
        device = sysfs / "bus/pci/devices" / fake.entity(number).removeprefix("gpu/")
        device.mkdir(parents=True)
        (device / "vendor").write_text("0x10de\n")
        (device / "class").write_text("0x030200\n")
        (device / "driver").symlink_to(driver)
    (sysfs / "module/nvidia").mkdir(parents=True)
    return sysfs

"""A polling sensor over the fake library, for the tests of what it reports."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from nodeagent.model import Observation
from nodeagent.nvml.driver import NvmlDriver
from nodeagent.nvml.polling import CHECKS, NvmlPolling
from nodeagent.sensing.baselines import ForgetRequests
from tests.fakenvml.inprocess import SetClock, bus
from tests.fakenvml.state import Fake

GPUS = 4
OK, LOST, RESET_REQUIRED, VANISHED, UNREADABLE = range(5)


class Room:
    """A node with a polling sensor. Every check of the sensor is due at every read."""

    def __init__(self, fake: Fake, folder: Path) -> None:
        self.fake = fake
        self.sysfs = bus(folder / "sys", fake)
        self.forgets = ForgetRequests()
        self.clock = SetClock()
        self.sensors: list[NvmlPolling] = []
        self.sensor = self.start()

    def start(self, remembered: dict[str, Any] | None = None, expected: int | None = None) -> NvmlPolling:
        """Start a new agent, as after an exit."""
        for each in self.sensors:
            each.close()
        periods_s = dict.fromkeys(CHECKS, 5.0)
        driver = NvmlDriver(self.sysfs, devices=self.sysfs / "none")  # a file for each GPU, or none at all
        self.forgets = ForgetRequests(self.forgets.dump())
        self.sensor = NvmlPolling(driver, self.clock, periods_s, remembered, expected, forgets=self.forgets)
        self.sensors.append(self.sensor)
        self.sensor.open()
        return self.sensor

    def restart(self) -> NvmlPolling:
        """Start a new agent with the remembered state, as from a file."""
        return self.start(json.loads(json.dumps(self.sensor.remembered())))

    def read(self, after_s: float = 5.0) -> list[Observation]:
        self.clock.at_s += after_s
        return list(self.sensor.read())

    def values(self, gpu: int | None = None, after_s: float = 5.0) -> dict[str, float]:
        """Read, and return the values of one GPU, or of everything else."""
        where = {self.fake.entity(gpu)} if gpu is not None else {"driver", "node"}
        return {each.check: each.value for each in self.read(after_s) if each.entity in where}


def told(seen: Iterable[Observation], check: str) -> list[tuple[str, float]]:
    return [(each.entity, each.value) for each in seen if each.check == check]

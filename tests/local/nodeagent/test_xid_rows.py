"""Every row of the Xid table, as the kernel line and as the NVML event, through both real sensors at once."""

from __future__ import annotations

import csv
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nodeagent.agent.agent import Agent
from nodeagent.agent.saved_state import SavedState
from nodeagent.agent.sensor_threads import FittedSensor
from nodeagent.kernel.kmsg import KmsgSensor
from nodeagent.model import word
from nodeagent.nvml.driver import NvmlDriver
from nodeagent.nvml.events import NvmlEvents
from nodeagent.policy import kernel_lines
from nodeagent.policy.loading import FOLDER, load
from nodeagent.sensing.clock import begin
from tests.fakenvml.inprocess import faked
from tests.fakenvml.state import Fake
from tests.unit.nodeagent.kernel.test_nvidia_lines import CODES, DETAILS, PROCESS, VARIANTS
from tests.unit.nodeagent.kernel.world import LINES, Log, raw

POLICY = load()
ROWS = {row["xid"]: row for row in csv.DictReader((FOLDER / "xid.csv").read_text().splitlines())}
PATIENCE_S = 20.0
VERDICT_GPU = 7  # only for Xid 154, which changes the action of all other Xids of its GPU


def test_the_table_has_every_code_that_the_driver_has() -> None:
    assert {*range(1, 179), 185} == set(CODES)
    assert (Path(kernel_lines.__file__).parent / "xid.csv").is_file()


class Both:
    """An agent that receives GPU events from NVML and from the kernel log."""

    def __init__(self, fake: Fake, log: Log, sysfs: Path) -> None:
        self.told: list[dict[str, Any]] = []
        self.fake, self.log, self.seq = fake, log, 0
        clock, driver = begin(None, 0.0), NvmlDriver(sysfs)
        self.agent = Agent(POLICY, clock, SavedState(), None, self.told.extend, lambda: driver.branch)
        kmsg = KmsgSensor(clock, LINES, opener=log.open, reader=log.read)
        self.agent.watch([FittedSensor(NvmlEvents(driver, clock)), FittedSensor(kmsg)])
        self.thread = threading.Thread(target=self.agent.run)
        self.thread.start()
        fake.until(lambda state: state.waiting == 1)

    def line(self, gpu: int, code: int) -> None:
        detail = DETAILS.get(code, PROCESS + "Ch 00000008")
        pci = self.fake.entity(gpu).removeprefix("gpu/").partition(".")[0]
        self.seq += 1
        self.log.write(raw(self.seq, f"NVRM: Xid (PCI:{pci}): {code}, {detail}", at_s=time.monotonic()))

    def until(self, holds: Callable[[], bool]) -> None:
        with self.agent.looked:
            assert self.agent.looked.wait_for(holds, PATIENCE_S)

    def sources(self, gpu: int, code: int) -> tuple[str, ...]:
        entity = self.fake.entity(gpu)
        for verdict in self.agent.published.verdicts:
            for each in verdict.findings if verdict.entity == entity else ():
                if (each.check, each.code) == ("xid", code):
                    return each.sources
        return ()

    def end(self) -> None:
        self.agent.stop()
        self.thread.join(PATIENCE_S)
        self.fake.until(lambda state: state.attached == 0)  # the agent does not wait for a blocked sensor


@pytest.fixture
def both(tmp_path: Path) -> Iterator[Both]:
    log = Log()
    with faked(tmp_path / "nvml") as fake:
        made = Both(fake, log, tmp_path)
        try:
            yield made
        finally:
            made.end()
            log.end()


@pytest.mark.parametrize("kernel_first", [True, False], ids=["the kernel first", "NVML first"])
def test_every_row_gets_its_action_once_when_both_sensors_report_it(both: Both, kernel_first: bool) -> None:
    by_entity: dict[tuple[str, int], str] = {}
    for code in CODES:
        gpu = VERDICT_GPU if code == 154 else code % VERDICT_GPU
        steps = [lambda g=gpu, c=code: both.line(g, c), lambda g=gpu, c=code: both.fake.xid(g, c)]
        for step in steps if kernel_first else reversed(steps):
            step()
        both.until(lambda g=gpu, c=code: both.sources(g, c) == ("kmsg", "nvml-events"))  # type: ignore[misc]
        by_entity[both.fake.entity(gpu), code] = word(
            POLICY.meaning("xid", code, VARIANTS.get(code, ""), 575).action
        )
    both.end()
    told = {(each["entity"], each["code"]): each for each in both.told if each["check"] == "xid"}
    assert {key: each["action"] for key, each in told.items()} == by_entity
    raised = [each["code"] for each in both.told if each["kind"] == "raised" and each["check"] == "xid"]
    assert sorted(raised) == sorted(CODES), "each code is raised exactly once"
    plain = [code for code in CODES if code not in VARIANTS]
    assert all(told[both.fake.entity(c % VERDICT_GPU), c]["action"] == ROWS[str(c)]["action"] for c in plain)

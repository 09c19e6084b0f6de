"""How the loader finds the library, or fails to find it, tested in separate processes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakenvml.build import SONAME, build
from tests.fakenvml.inprocess import bus
from tests.fakenvml.state import VARIABLE, Fake

pytestmark = pytest.mark.local

ROOT = Path(__file__).parents[4]
PROCESS_S = 30.0

SWEEP = """
import sys
from pathlib import Path
from nodeagent.sensing.clock import Anchor, Clock
from nodeagent.nvml.driver import NvmlDriver
from nodeagent.nvml.polling import CHECKS, NvmlPolling
from nodeagent.sensing.sensor import Unavailable

sensor = NvmlPolling(NvmlDriver(Path(sys.argv[1])), Clock(Anchor("", 0.0)), dict.fromkeys(CHECKS, 0.001))
def look():
    try:
        sensor.open()
        for each in sensor.read():
            print(each.entity, each.check, f"{each.value:g}", each.text)
    except Unavailable as error:
        print("unavailable:", error)
"""
LOOK = SWEEP + "look()\n"
LOOK_TWICE = SWEEP + "look()\nprint('again', flush=True)\nsys.stdin.readline()\nlook()\n"

WAIT = """
import sys
from pathlib import Path
from nodeagent.sensing.clock import Anchor, Clock
from nodeagent.nvml.driver import NvmlDriver
from nodeagent.nvml.events import NvmlEvents

sensor = NvmlEvents(NvmlDriver(Path(sys.argv[1])), Clock(Anchor("", 0.0)))
sensor.open()
seen = []
for _ in range(20):
    seen += sensor.read()
    if seen:
        break
print([(each.entity, each.check, each.value) for each in seen])
sensor.close()
"""


def start(
    code: str, sysfs: Path, library: Path | None = None, fake: Fake | None = None
) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    if library is not None:
        environment["LD_LIBRARY_PATH"] = str(library.parent)
    if fake is not None:
        environment[VARIABLE] = str(fake.path)
    return subprocess.Popen(
        [sys.executable, "-c", code, str(sysfs)],
        cwd=ROOT, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip


def said(process: subprocess.Popen[str], word: str = "") -> list[str]:
    out, _ = process.communicate(word, timeout=PROCESS_S)
    assert process.returncode == 0
    return out.splitlines()


def test_polling_is_unavailable_without_a_library_and_gpus(tmp_path: Path) -> None:
    lines = said(start(LOOK, tmp_path))
    assert lines == [
        "unavailable: no NVIDIA driver, and no NVIDIA GPU on the PCI bus (nvmlInit: LIBRARY_NOT_FOUND)"
    ]


def test_gpus_without_a_library_are_reported(tmp_path: Path) -> None:
    with Fake(tmp_path / "nvml", 1) as fake:
        lines = said(start(LOOK, bus(tmp_path / "sys", fake)))
    assert lines == ["driver nvml 1 nvmlInit: LIBRARY_NOT_FOUND"]


def test_functions_that_the_library_lacks_disable_only_their_checks(tmp_path: Path) -> None:
    with Fake(tmp_path / "nvml", 1) as fake:
        lines = said(start(LOOK, tmp_path, build(old_driver=True), fake))
    checks = {line.split()[1]: line.split()[2] for line in lines}
    assert checks["gpu_temperature_margin"] == "37"
    assert checks["gpu_state"] == checks["gpu_throttled"] == "0"
    assert not checks.keys() & {"fabric", "ecc_sram_threshold"}


def test_a_library_that_was_replaced_with_the_driver_is_reloaded(tmp_path: Path) -> None:
    installed = tmp_path / "lib" / SONAME
    installed.parent.mkdir()
    shutil.copy(build(), installed)
    with Fake(tmp_path / "nvml", 1) as fake:
        fake.driver("mismatch")
        process = start(LOOK_TWICE, bus(tmp_path / "sys", fake), installed, fake)
        assert process.stdout is not None
        assert process.stdout.readline().startswith("driver nvml 3 ")
        assert process.stdout.readline() == "again\n"
        installed.unlink()
        shutil.copy(build(old_driver=True), installed)
        fake.driver("loaded")
        checks = {line.split()[1] for line in said(process, "go\n")}
    assert "gpu_temperature_margin" in checks
    assert "fabric" not in checks  # only the first library has it


def test_an_xid_sent_by_another_process_is_received(tmp_path: Path) -> None:
    with Fake(tmp_path / "nvml", 2) as fake:
        process = start(WAIT, tmp_path, build(), fake)
        fake.until(lambda s: s.waiting == 1, within_s=PROCESS_S)
        fake.xid(1, 95)
        assert said(process) == [str([(fake.entity(1), "xid", 95.0)])]
        assert fake.state.attached == 0

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path

from holdfast.protocol.progress import Phase, read, step_times_s
from holdfast.protocol.progress_writer import Page

ROOT = Path(__file__).parents[2]

HAMMER = """
import sys
from pathlib import Path
from holdfast.protocol.progress_writer import Page
page = Page.attach(Path(sys.argv[1]))
page.begin(1, 0, 0, 0, 0)
step = 0
while True:
    step += 1
    page.phase(3)
    page.commit(step, float(step), float(step), 1, 2, 3.0, 0, step)
    if step == 10:
        print("going", flush=True)
"""


def test_a_page_that_another_process_writes_constantly_is_never_torn(tmp_path: Path) -> None:
    path = tmp_path / "rank0.page"
    Page.create(path).close()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", HAMMER, str(path)], stdout=subprocess.PIPE, env=environment
    ) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"going\n"
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as page:
            found = [read(page) for _ in range(20_000)]
            times = [step_times_s(page) for _ in range(200)]
        writer.kill()
    whole = [progress for progress in found if progress is not None]
    assert len(whole) > len(found) // 2
    assert len({progress.step for progress in whole}) > 10
    for at in whole:
        assert at.step == at.loss == at.grad_norm == at.position == at.steps_done == at.samples
        assert at.tokens == 2 * at.step
        assert at.times_written == at.step - 1
        assert at.phase in (Phase.DATA, Phase.FORWARD)
    assert any(times)

"""Train with the habits of healthy scripts: argv[2:] names them, and each takes SECONDS, one after the other.

A habit that has completed leaves a file of its name, with its duration, in the folder argv[1].
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from slowdata import Data, Slowly
from torch import Tensor, nn

import holdfast

SECONDS = float(os.environ.get("HABIT_S", "8"))
CALM = 40  # steps between two habits: after fewer, the p99 is unreliable and the limits are generous
PACE_S = 0.01


class Training:
    """The objects that habits use."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.session = holdfast.join()
        self.rank = self.session.rank
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
        self.model = nn.parallel.DistributedDataParallel(self.net)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.state: Any = self.session.protect(model=self.model, optimizer=self.optimizer)

    def loss(self) -> Tensor:
        return self.model(torch.randn(16, 32)).pow(2).mean()  # type: ignore[no-any-return]


def busy(seconds: float, work: Callable[[], object]) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        work()


def evaluate(here: Training) -> None:
    def batch() -> None:
        with torch.no_grad():
            here.net(torch.randn(256, 32))

    busy(SECONDS, batch)


def evaluates_declared(here: Training) -> None:
    if here.rank == 0:
        with here.state.pause("eval"):
            evaluate(here)


def evaluates(here: Training) -> None:
    if here.rank == 0:
        evaluate(here)


def evaluates_last(here: Training) -> None:
    """Wait for a device after the last step, when the other rank has ended. There may be no device here."""
    if here.rank == 0:
        names: dict[str, Any] = {"wait": time.sleep}
        exec(compile("def synchronize(s):\n    wait(s)\n", torch.cuda.__file__, "exec"), names)
        names["synchronize"](SECONDS)


def sleeps(here: Training) -> None:
    """Wait for an evaluation that runs elsewhere."""
    if here.rank == 0:
        time.sleep(SECONDS)


def new_workers(here: Training) -> None:
    """Start loader workers with long imports on all ranks, as at the beginning of an epoch."""
    loader = torch.utils.data.DataLoader(
        Data(),
        batch_size=8,
        num_workers=1,
        multiprocessing_context="spawn",
        worker_init_fn=Slowly(SECONDS / 2),
    )
    assert sum(1 for _ in loader) == 8


def recompiles(here: Training) -> None:
    if here.rank == 0:
        burn = f"import time\nend = time.time() + {SECONDS}\nwhile time.time() < end: pass"
        subprocess.run([sys.executable, "-c", burn], check=True)


def stalled_file(here: Training) -> None:
    """Block in a read until another thread of this process writes."""
    if here.rank == 0:
        path = here.folder / "pipe"
        os.mkfifo(path)
        writer = os.open(path, os.O_RDWR)
        threading.Timer(SECONDS, os.write, (writer, b"x")).start()
        assert path.open("rb", buffering=0).read(1) == b"x"


def saves_slowly(here: Training) -> None:
    if here.rank == 0:
        with (here.folder / "slow.bin").open("wb") as file:

            def piece() -> None:
                file.write(b"x" * 4096)
                file.flush()
                os.fsync(file.fileno())
                time.sleep(0.05)

            busy(SECONDS, piece)


def torch_saves(here: Training) -> None:
    if here.rank == 0:
        content = {"model": here.net.state_dict(), "more": torch.zeros(1 << 20)}
        busy(SECONDS, lambda: torch.save(content, here.folder / "checkpoint.pt"))


def collects_garbage(here: Training) -> None:
    """Make long calls of one function on the same line."""
    if here.rank == 0:
        kept = [[each] for each in range(2_000_000)]
        busy(min(SECONDS, 3.0), gc.collect)
        assert kept


def accumulates(here: Training) -> None:
    """Accumulate very many small passes in one step, on all ranks."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        with here.model.no_sync():
            here.loss().backward()
    here.optimizer.zero_grad()


def downloads(here: Training) -> None:
    if here.rank == 0:
        _receive(int(SECONDS / 0.5))


def downloads_in_a_thread(here: Training) -> None:
    """Wait in the main thread for a lock that only a thread that receives data can release."""
    if here.rank == 0:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(_receive, int(SECONDS / 0.5)).result()


def _receive(count: int) -> None:
    """Receive `count` bytes, which arrive one by one as from a slow machine."""
    with socket.create_connection(("127.0.0.1", int(os.environ["HABIT_PORT"]))) as line:
        for _ in range(count):
            assert line.recv(1) == b"x"


def backs_off(here: Training) -> None:
    """Wait in the main thread for a thread that pauses, interruptibly, before it retries."""
    if here.rank == 0:
        stop = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            pool.submit(lambda: [stop.wait(SECONDS / 2) for _ in range(2)]).result()


def waits_for_a_timer(here: Training) -> None:
    if here.rank == 0:
        rung = threading.Event()
        threading.Timer(SECONDS, rung.set).start()
        rung.wait()


def waits_for_a_signal(here: Training) -> None:
    if here.rank == 0:
        rung = threading.Event()
        before = signal.signal(signal.SIGALRM, lambda *_: rung.set())
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        rung.wait()
        signal.signal(signal.SIGALRM, before)


def waits_for_a_native_thread(here: Training) -> None:
    """Wait for a thread that is unknown to Python until it calls back."""
    if here.rank == 0:
        libc, rung = ctypes.CDLL(None), threading.Event()
        call = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)

        def begin(_: object) -> None:
            rung.set()

        ring = call(begin)
        event = (ctypes.c_byte * 64)()
        ctypes.c_int.from_buffer(event, 12).value = 2  # sigevent.sigev_notify: SIGEV_THREAD
        ctypes.c_void_p.from_buffer(event, 16).value = ctypes.cast(ring, ctypes.c_void_p).value
        timer = ctypes.c_void_p()
        assert libc.timer_create(time.CLOCK_MONOTONIC, event, ctypes.byref(timer)) == 0
        after = (ctypes.c_long * 4)(0, 0, int(SECONDS), 0)  # itimerspec
        assert libc.timer_settime(timer, 0, after, None) == 0
        rung.wait()


def logs(here: Training) -> None:
    """Sleep for a second, several times during the run."""
    if here.rank == 0:
        time.sleep(1.0)


def varies(here: Training) -> None:
    """Vary the step time at random, by a factor of up to twenty."""
    time.sleep(PACE_S / 2 * 20 ** torch.rand(()).item())


def late_first_batch(here: Training) -> None:
    if here.rank == 1:
        time.sleep(SECONDS)


def waits(here: Training) -> None:
    """Report that the test may now act on the process from outside."""
    if here.rank == 0:
        (here.folder / "ready").touch()


AGAIN = {"logs": 4, "new_workers": 2}  # repetitions; all others occur once
STEPS_OF = {"varies": 100, "waits": 10**9}  # consecutive steps with the habit; all others take one
FIRST = {"late_first_batch"}  # habits that begin in the first step
LAST = {"evaluates_last"}  # habits of the last step
# Before the forward pass; all others follow the commit.
IN_STEP = {
    "accumulates",
    "varies",
    "new_workers",
    "late_first_batch",
}


def main() -> None:
    here = Training(Path(sys.argv[1]))
    plan = [
        (name, STEPS_OF.get(name, 1), 0 if name in FIRST else CALM)
        for name in sys.argv[2:]
        for _ in range(AGAIN.get(name, 1))
    ]
    total = sum(steps + calm for _, steps, calm in plan) + (CALM if plan[-1][0] not in LAST else 0)
    begins = 0
    at: dict[int, str] = {}
    for name, steps, calm in plan:
        begins += calm
        if name == "waits":
            at[begins] = name
        else:
            at |= dict.fromkeys(range(begins, begins + steps), name)
        begins += steps
    for step in here.state.steps(total):
        name = at.get(step, "")
        if name in IN_STEP:
            timed(here, name, step, at)
        time.sleep(PACE_S)
        loss = here.loss()
        loss.backward()
        here.optimizer.step()
        here.optimizer.zero_grad()
        here.state.commit(loss=loss)
        if name and name not in IN_STEP:
            timed(here, name, step, at)


def timed(here: Training, name: str, step: int, at: dict[int, str]) -> None:
    """Run the habit; after its last step, write its duration to its file."""
    began = time.monotonic()
    globals()[name](here)
    took_s = time.monotonic() - began
    last = step == max(each for each, what in at.items() if what == name)
    working = 1 if name == "late_first_batch" else 0
    if last and here.rank == working and name != "waits":
        leave(here, name, took_s)


def leave(here: Training, name: str, took_s: float) -> None:
    """Leave the file of a habit that has completed."""
    partial = here.folder / f".{name}"
    partial.write_text(f"{took_s}")
    partial.replace(here.folder / name)


if __name__ == "__main__":
    main()

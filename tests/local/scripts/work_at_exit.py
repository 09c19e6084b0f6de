"""End at step 20, with work to do at exit: python work_at_exit.py FOLDER HOW.

HOW: exit, raise, thread (raises while a thread works), stuck (an exit handler that does not end). With upload
or helper, the script exits with 0 and leaves a process behind that works for some seconds or waits forever.
"""

from __future__ import annotations

import atexit
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from tiny_model import train

import holdfast

SECONDS = 5  # of an upload: longer than a process is watched to see whether it works

folder, how = Path(sys.argv[1]), sys.argv[2]


def work(rank: int) -> None:
    (folder / f"begun.{rank}").touch()
    threading.Event().wait(None if how == "stuck" else 1.5)  # an upload
    (folder / f"done.{rank}").touch()


def after(step: int, _: Any) -> None:
    if step != 20 or how in ("upload", "helper"):
        return
    rank = holdfast.join().rank
    if how == "thread":
        threading.Thread(target=work, args=(rank,)).start()
    else:
        atexit.register(work, rank)
    if how in ("exit", "stuck"):
        sys.exit(3)
    raise ValueError("a bug")


train(30, after=after)
if how in ("upload", "helper") and holdfast.join().rank == 0:
    upload = f"""
import pathlib, time
began = time.monotonic()
while time.monotonic() < began + {SECONDS}:
    pathlib.Path("/dev/null").write_bytes(bytes(20_000))
    time.sleep(0.05)
pathlib.Path({str(folder / "done.0")!r}).touch()
"""
    helper = ["sleep", "1000"]
    words = [sys.executable, "-c", upload] if how == "upload" else helper
    subprocess.Popen(words, start_new_session=True)

"""End at step 20, and have something to do on the way out: python leaving.py FOLDER HOW.

HOW: exit, raise, thread (raises while a thread works), stuck (an exit handler that does not end), upload
(ends well, and leaves a process).
"""

from __future__ import annotations

import atexit
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from tiny import train

import holdfast

folder, how = Path(sys.argv[1]), sys.argv[2]


def work(rank: int) -> None:
    (folder / f"begun.{rank}").touch()
    threading.Event().wait(None if how == "stuck" else 1.5)  # an upload
    (folder / f"done.{rank}").touch()


def after(step: int, _: Any) -> None:
    if step != 20 or how == "upload":
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
if how == "upload" and holdfast.join().rank == 0:
    upload = f"trap '' TERM; sleep 1.5; touch {folder}/done.0"
    subprocess.Popen(["sh", "-c", upload], start_new_session=True)

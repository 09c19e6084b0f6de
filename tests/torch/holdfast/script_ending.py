"""One script that forms a process group, run by `holdfast.worker.script` without a launcher."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from holdfast.protocol import rank_channel
from holdfast.protocol.rank_channel import WorkerMessage

_RUN = """
import socket, sys
from pathlib import Path
from holdfast.worker import script as ending
from holdfast.worker.program import parse
from holdfast.worker.launcher_channel import LauncherChannel
program = parse(["python", sys.argv[1]], Path.cwd())
sys.exit(ending.run(program, LauncherChannel(socket.socket(fileno=int(sys.argv[2])), Path.cwd(), 0, 1)))
"""
_SCRIPT = """
import os, sys
import torch.distributed as dist
dist.init_process_group("gloo", init_method="file://" + os.path.abspath("rendezvous"), rank=0, world_size=1)
print("trained", flush=True)
"""


Ended = tuple[subprocess.CompletedProcess[str], list[WorkerMessage]]


def ended(folder: Path, last: str) -> Ended:
    """Run a script that ends with `last`; return its result and its messages to the launcher."""
    script = folder / "script.py"
    script.write_text(_SCRIPT + last)
    ours, theirs = rank_channel.pair()
    with ours:
        with theirs:
            words = [sys.executable, "-c", _RUN, str(script), str(theirs.fileno())]
            done = subprocess.run(
                words,
                capture_output=True,
                text=True,
                check=False,
                cwd=folder,
                timeout=120,
                pass_fds=(theirs.fileno(),),
            )
        said = []
        with suppress(rank_channel.Closed):
            while True:
                said.append(rank_channel.receive(ours, WorkerMessage)[0])
    return done, said

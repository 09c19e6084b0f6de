"""`python -m bench NAME [options]`: measure, show a table, keep all figures."""

from __future__ import annotations

import importlib
import signal
import sys
from collections.abc import Sequence
from types import FrameType

from bench.launching import Failed
from bench.say import say

NAMES = {
    "recovery": "from the kill of a rank to the first new step, side by side with torchrun",
    "start": "from a launcher's start to the first step; how long a killed part of ours is missed",
    "overhead": "what holdfast costs while nothing happens, against torchrun",
    "snapshot": "copying the state into memory and onto storage, against plain copies",
    "frozen": "what a later snapshot costs beside frozen parameters: nearly nothing, or as much as a copy",
    "transfer": "a snapshot from one member to another, against a plain copy through a socket",
    "gpu": "on an NVIDIA GPU: copies beside a kernel that stands still, snapshots, what a commit waits for",
    "nodeagent": "the node agent: from an event to its verdict, what a poll and a quiet hour cost",
    "flood": "the node agent in a flood of kernel lines: what it sees, what is lost, and whether it says so",
    "quarantine": "a simulated year of 2,000 nodes: who is taken out, how soon, and who never",
    "soak": "random faults for a long time: weights stay equal, nothing grows",
}

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(argv: Sequence[str]) -> int:
    """Run one bench and return its exit code; 2 for a command line that is no good."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        say("python -m bench NAME [options]: measure, show a table, keep all figures as JSON\n")
        for name, about in NAMES.items():
            say(f"  {name:<12}{about}")
        say("\npython -m bench NAME --help says what exactly is measured, and the options")
        return 0 if argv else 2
    if argv[0] not in NAMES:
        sys.stderr.write(f"bench: no bench {argv[0]!r}; there are {', '.join(NAMES)}\n")
        return 2
    for signum in _ENDING:
        if signal.getsignal(signum) != signal.SIG_IGN:  # nohup
            signal.signal(signum, _terminated)  # so that what was started is ended, and its memory given back
    try:
        code: int = importlib.import_module(f"bench.{argv[0]}").main(list(argv[1:]))
    except Failed as error:
        sys.stderr.write(f"bench: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    return code


def _terminated(_signum: int, _frame: FrameType | None) -> None:
    """End the bench. A second signal must not cut off what the first one has begun: gigabytes would stay."""
    for signum in _ENDING:
        signal.signal(signum, signal.SIG_IGN)
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

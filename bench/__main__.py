"""`python -m bench NAME [options]`: measure, print a table, store all figures as JSON."""

from __future__ import annotations

import importlib
import signal
import sys
from collections.abc import Sequence
from types import FrameType

from bench.harness.console import say
from bench.harness.launchers import Failed

BENCHES = {  # package and module of each bench, and its line in the help; a bench has its module's name
    "recovery.recovery": "from the kill of a rank to the first new step, side by side with torchrun",
    "recovery.picture": "docs/recovery.svg, drawn from one run of holdfast and one of torchrun",
    "start.start": "from a launcher's start to the first step; how soon a killed process is replaced",
    "overhead.overhead": "what holdfast costs while nothing fails, against torchrun",
    "snapshot.snapshot": "copying the state into memory and onto storage, against plain copies",
    "snapshot.frozen": "what the second and later snapshots cost when most parameters are frozen",
    "snapshot.transfer": "sending a snapshot from one member to another, against a plain socket copy",
    "gpu.gpu": "on an NVIDIA GPU: copies beside a blocked kernel, snapshots, what a commit waits for",
    "nodeagent.nodeagent": "the node agent: from an event to its verdict, what a poll and an idle hour cost",
    "nodeagent.flood": "the node agent in a flood of kernel lines: what it sees, what it reports as lost",
    "quarantine.quarantine": "a simulated year of 2,000 nodes: which ones are taken out, and how soon",
    "mutation.mutation": "how many small changes of the pure modules and file formats the tests notice",
    "soak.soak": "random faults for a long time: the weights stay equal, nothing grows",
}
MODULES = {path.rpartition(".")[2]: f"bench.{path}" for path in BENCHES}

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(argv: Sequence[str]) -> int:
    """Run one bench and return its exit code; 2 for an invalid command line."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        say("python -m bench NAME [options]: measure, print a table, store all figures as JSON\n")
        for name, about in zip(MODULES, BENCHES.values(), strict=True):
            say(f"  {name:<12}{about}")
        say("\npython -m bench NAME --help describes what is measured, and the options")
        return 0 if argv else 2
    if argv[0] not in MODULES:
        sys.stderr.write(f"bench: unknown bench {argv[0]!r}: expected one of {', '.join(MODULES)}\n")
        return 2
    for signum in _ENDING:
        if signal.getsignal(signum) != signal.SIG_IGN:  # nohup
            signal.signal(signum, _terminated)  # to end what the bench has started, and free its memory
    try:
        code: int = importlib.import_module(MODULES[argv[0]]).main(list(argv[1:]))
    except Failed as error:
        sys.stderr.write(f"bench: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    return code


def _terminated(_signum: int, _frame: FrameType | None) -> None:
    """End the bench; ignore later signals, which would leave gigabytes of shared memory behind."""
    for signum in _ENDING:
        signal.signal(signum, signal.SIG_IGN)
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

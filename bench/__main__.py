"""`python -m bench NAME [options]`: run a benchmark, print a table and store all figures as JSON."""

from __future__ import annotations

import importlib
import signal
import sys
from collections.abc import Sequence
from types import FrameType

from bench.harness.console import say
from bench.harness.launchers import Failed
from holdfast.errors import BadInput

BENCHES = {  # package and module of each bench, with its line in the help; a bench is named after its module
    "recovery.recovery": "time from the kill of a rank to the first new step, compared with torchrun",
    "recovery.picture": "draw docs/recovery.svg from one run of holdfast and one of torchrun",
    "start.start": "time from a launcher's start to the first step, and to replace a killed process",
    "overhead.overhead": "cost of holdfast while nothing fails, compared with torchrun",
    "snapshot.snapshot": "speed of snapshots and checkpoints, compared with plain copies",
    "snapshot.frozen": "cost of the second and later snapshots when most parameters are frozen",
    "snapshot.transfer": "speed of sending a snapshot to another member, compared with a plain socket copy",
    "snapshot.sharing": "time of a checkpoint that 1, 2 and 4 members write, each at the same limited rate",
    "gpu.gpu": "on an NVIDIA GPU: copies during a blocked kernel, snapshots, commits",
    "nodeagent.nodeagent": "node agent: time from an event to its verdict, cost of polling and idling",
    "nodeagent.flood": "node agent in a flood of kernel lines: what it finds, and what it reports as lost",
    "quarantine.quarantine": "a simulated year of 2,000 nodes: which ones are taken out, and how soon",
    "cluster.cluster": "time from the kill of a rank in a pod to its next step, compared with torchrun",
    "cluster.nodes.cluster_nodes": "time from the loss or drain of a node to the next step; cost at rest",
    "chaos.chaos": "all faults at random, on a cluster of three nodes: checks that the weights still match",
    "scale.scale": "cost and reaction times of a cluster's supervisor with 2,000 members in 250 jobs",
    "mutation.mutation": "how many small changes to the pure modules and file formats the tests notice",
    "soak.soak": "random faults for a long time: checks that the weights still match and nothing grows",
}
MODULES = {path.rpartition(".")[2].replace("_", "-"): f"bench.{path}" for path in BENCHES}

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(argv: Sequence[str]) -> int:
    """Run one bench and return its exit code; 2 for an invalid command line."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        say("python -m bench NAME [options]: run a benchmark, print a table, store all figures as JSON\n")
        for name, about in zip(MODULES, BENCHES.values(), strict=True):
            say(f"  {name:<15}{about}")
        say("\npython -m bench NAME --help describes the measurement and its options")
        return 0 if argv else 2
    if argv[0] not in MODULES:
        sys.stderr.write(f"bench: unknown bench {argv[0]!r}: expected one of {', '.join(MODULES)}\n")
        return 2
    for signum in _ENDING:
        if signal.getsignal(signum) != signal.SIG_IGN:  # respect nohup
            signal.signal(signum, _terminated)  # so that the bench ends its processes and frees its memory
    try:
        code: int = importlib.import_module(MODULES[argv[0]]).main(list(argv[1:]))
    except Failed as error:
        sys.stderr.write(f"bench: {error}\n")
        return 1
    except BadInput as error:
        sys.stderr.write(f"bench: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 130
    return code


def _terminated(_signum: int, _frame: FrameType | None) -> None:
    """End the bench, and ignore further signals so that the cleanup can free gigabytes of shared memory."""
    for signum in _ENDING:
        signal.signal(signum, signal.SIG_IGN)
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

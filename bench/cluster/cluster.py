"""`python -m bench cluster`: measure how pods recover from SIGKILL of a rank, compared with torchrun.

The cluster is the one in KUBECONFIG. Holdfast, Kubeflow's training operator and the image
holdfast-trainer:dev must be installed there. If one is missing, or the API server does not respond, the bench
reports this and exits with code 2 before it creates anything.

The same script trains in two PyTorchJobs, one after the other, each with two pods of one rank. One is
annotated for Holdfast; the other starts its ranks with torchrun and `--max-restarts`. Under torchrun nothing
restores the state, which saves torchrun the time that loading a checkpoint would take.

The bench sends SIGKILL to a rank from within the rank's container. The measured time runs from the kill to
the next optimizer step of that container's rank, which the whole group completes together.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench import text
from bench.cluster import installation, pod_objects
from bench.cluster.pod_objects import CONTAINER
from bench.harness import results
from bench.harness.console import make_parser, say
from holdfast.errors import BadInput
from supervisor.cli.on_cluster.demo.pods import missing_image

SCRIPT = Path(__file__).with_name("pod_workload.py")
MEDIAN_S, WORST_S = 0.5, 1.5  # the targets
READY_S = 180.0  # limit for the pods to begin training
CALM_S = 3.0  # between a recovery and the next kill, so that new warm processes are ready
PODS = 2
JOB_LABEL = "training.kubeflow.org/job-name"

# Kills this container's rank once it is training. Prints the seconds until the first step of its successor,
# the last step before the kill, and the first step after it. Prints "- - -" if no step follows in time.
_KILL = """
import os, struct, sys, time
size, path, limit_ns = 32, "/tmp/ticks", float(sys.argv[1]) * 1e9
def last():
    with open(path, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size // size * size - size))
        return struct.unpack("<qqqq", file.read(size))
def until(condition):
    began = time.monotonic_ns()
    while not condition() and time.monotonic_ns() - began < limit_ns:
        time.sleep(0.0005)
    return condition()
if not until(lambda: time.monotonic_ns() - last()[0] < 1e9):
    sys.exit("the rank did not train within %g s" % (limit_ns / 1e9))
before = last()
began = time.monotonic_ns()
os.kill(before[2], 9)
if until(lambda: last()[2] != before[2]):
    now = last()
    print((now[0] - began) / 1e9, before[1], now[1])
else:
    print("- - -")
"""


@dataclass(frozen=True, slots=True)
class PodRecovery:
    """One kill. `lost` is the number of steps that were redone; -1 if nothing restores the state.

    If the rank completed no step within the limit, `seconds` is that limit, and `is_late` is True.
    """

    mode: str
    seconds: float
    lost: int
    is_late: bool = False


class ClusterBench:
    """The jobs of one bench, in a separate namespace. `close` deletes the namespace."""

    def __init__(self, namespace: str, patience_s: float) -> None:
        self._namespace = namespace
        self._patience_s = patience_s
        self._kubectl("create", "namespace", namespace, scoped=False)

    def close(self) -> None:
        self._kubectl("delete", "namespace", self._namespace, "--wait=false", scoped=False)

    def measure(self, mode: str, kills: int, seed: int) -> list[PodRecovery]:
        """Start the job of `mode`, kill ranks in it, delete it, and return the recoveries."""
        self._apply(mode)
        chosen, found = random.Random(seed), []
        try:
            pods = self._training_pods(mode)
            for number in range(kills):
                time.sleep(CALM_S + chosen.random())
                found.append(self._kill(mode, chosen.choice(pods)))
                say(f"{mode:9} kill {number + 1:3}  {_shown(found[-1])}")
            self._refuse_restarted(mode)
        finally:
            self._kubectl("delete", "pytorchjob", mode, "--wait=true")
        return found

    def _kill(self, mode: str, pod: str) -> PodRecovery:
        """Kill the rank of a pod. Raises `TimeoutError` if Holdfast does not recover it within the limit."""
        words = ("exec", pod, "-c", CONTAINER, "--", "python", "-c", _KILL, str(self._patience_s))
        seconds, before, after = self._kubectl(*words, limit_s=2 * self._patience_s + 30).split()
        if mode == "holdfast" and seconds == "-":
            raise TimeoutError(f"{pod}: no step within {self._patience_s:g} s of the kill")
        if seconds == "-":
            return PodRecovery(mode, self._patience_s, -1, is_late=True)
        lost = max(0, int(before) + 1 - int(after)) if mode == "holdfast" else -1
        return PodRecovery(mode, float(seconds), lost)

    def _training_pods(self, mode: str) -> list[str]:
        """Return the pods of a job once each has completed a step.

        Raises `BadInput` if a node lacks an image, and `TimeoutError` if the pods do not begin training in
        time.
        """
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline:
            listed = json.loads(self._kubectl("get", "pods", "-l", f"{JOB_LABEL}={mode}", "-o", "json"))[
                "items"
            ]
            names = sorted(each["metadata"]["name"] for each in listed)
            ready = [name for name in names if self._has_ticked(name)]
            if len(ready) == PODS:
                return ready
            if lacking := missing_image(listed):
                raise BadInput(lacking)
            time.sleep(1.0)
        raise TimeoutError(f"{mode}: the pods did not begin training within {READY_S:g} s")

    def _has_ticked(self, pod: str) -> bool:
        words = ["exec", pod, "-c", CONTAINER, "--", "test", "-s", "/tmp/ticks"]
        return subprocess.run(self._command(words), capture_output=True, check=False).returncode == 0

    def _refuse_restarted(self, mode: str) -> None:
        """Raise `RuntimeError` if a container was restarted, because that is not a recovery in place."""
        if mode != "holdfast":
            return
        listed = json.loads(self._kubectl("get", "pods", "-l", f"{JOB_LABEL}={mode}", "-o", "json"))["items"]
        counts = [each["restartCount"] for pod in listed for each in pod["status"]["containerStatuses"]]
        if any(counts):
            raise RuntimeError(f"containers were restarted: {counts}")

    def _apply(self, mode: str) -> None:
        objects = [pod_objects.script(SCRIPT), _pytorch_job(mode)]
        given = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
        self._kubectl("apply", "-f", "-", given=given)

    def _kubectl(self, *words: str, given: str = "", scoped: bool = True, limit_s: float = 120.0) -> str:
        done = subprocess.run(
            self._command(words, scoped=scoped),
            input=given,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"kubectl {' '.join(words[:4])}: {done.stderr.strip()}")
        return done.stdout

    def _command(self, words: Sequence[str], *, scoped: bool = True) -> list[str]:
        return ["kubectl", *(("-n", self._namespace) if scoped else ()), *words]


def _pytorch_job(mode: str) -> dict[str, Any]:
    annotated = mode == "holdfast"
    command = ["python", "/script/train.py"]
    if not annotated:  # the operator gives the master's pod a headless Service of this name
        command = [
            *("torchrun", f"--nnodes={PODS}", "--nproc-per-node=1", "--max-restarts=1000"),
            *("--rdzv-backend=c10d", f"--rdzv-endpoint={mode}-master-0:29400", "/script/train.py"),
        ]
    annotations = {"holdfast.dev/inject": "true"} if annotated else {}
    spec = pod_objects.pod(command, annotated=annotated)
    template = {"metadata": {"annotations": annotations}, "spec": spec}
    return pod_objects.pytorch_job(mode, PODS, template, "Never")


def _shown(found: PodRecovery) -> str:
    return f"> {found.seconds:g} s" if found.is_late else f"{found.seconds:.3f} s"


def _report(found: list[PodRecovery]) -> bool:
    """Print the table and the verdicts; return False if a target is missed."""
    rows = []
    for mode in dict.fromkeys(each.mode for each in found):
        those = sorted((each for each in found if each.mode == mode), key=lambda each: each.seconds)
        lost = max(each.lost for each in those)
        middle = text.seconds(statistics.median(each.seconds for each in those))
        late = f"> {those[-1].seconds:g} s" if those[-1].is_late else text.seconds(those[-1].seconds)
        rows.append([mode, str(len(those)), middle, late, str(lost) if lost >= 0 else "all"])
    say(text.table(["mode", "kills", "median", "worst", "steps lost, at most"], rows))
    ours = [each.seconds for each in found if each.mode == "holdfast"]
    theirs = [each.seconds for each in found if each.mode == "torchrun"]
    median, worst = statistics.median(ours), max(ours)
    if theirs:
        say(f"holdfast takes 1/{statistics.median(theirs) / median:.1f} of torchrun's time")
    lost = max(each.lost for each in found)
    verdicts = [
        text.at_most(f"median <= {MEDIAN_S} s", median, MEDIAN_S, text.seconds(median)),
        text.at_most(f"worst <= {WORST_S} s", worst, WORST_S, text.seconds(worst)),
        text.at_most("at most one step lost", lost, 1, str(lost)),
    ]
    for each in verdicts:
        say(each.line)
    return text.all_met(verdicts)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = make_parser("cluster", __doc__ or "")
    parser.add_argument("--kills", type=int, default=20, metavar="N", help="number of kills under holdfast")
    parser.add_argument("--others", type=int, default=4, metavar="N", help="number of kills under torchrun")
    parser.add_argument(
        "--patience",
        type=float,
        default=60.0,
        metavar="S",
        help="time limit for each recovery; if torchrun takes longer, the recovery counts as this long",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed for choosing pods and times")
    parser.add_argument("--strict", action="store_true", help="exit with code 1 if a target is missed")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    options = _parse(argv)
    installation.check()
    stored = results.begin("cluster")
    bench = ClusterBench(f"holdfast-bench-{int(time.time())}", options.patience)
    try:
        found = bench.measure("holdfast", options.kills, options.seed)
        if options.others:
            found += bench.measure("torchrun", options.others, options.seed)
    finally:
        bench.close()
    is_met = _report(found)
    stored["recoveries"] = [asdict(each) for each in found]
    results.write(stored)
    return 0 if is_met or not options.strict else 1

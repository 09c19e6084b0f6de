"""Inject all kinds of faults at random into several jobs on a cluster, and compare their weights at the end.

The cluster that KUBECONFIG selects needs three nodes, Holdfast, Kubeflow's training operator, and the image
holdfast-trainer:dev. The bench drains nodes, kills the supervisor, and removes the webhook for several
seconds, so do not run it on a cluster that others use. To kill or disconnect a node, the bench runs only
commands that these variables contain. It leaves out the faults whose commands are missing, and the report
lists them:

    HOLDFAST_NODE_KILL, HOLDFAST_NODE_START    followed by a node: cut its power; boot it
    HOLDFAST_NODE_CUT, HOLDFAST_NODE_HEAL      followed by a node: disconnect it; connect it again
    HOLDFAST_API_SERVER_STOP, ..._CONT         stop the API server's process; continue it

The bench also ends the dry run of the quarantine until it ends itself, unless an operator has configured it.

First, the training runs undisturbed. Then three jobs do the same training while the bench injects one fault
after another: a Job and a PyTorchJob, each with a standby, and a StatefulSet without one. A fault is injected
only when all jobs train and all of their standbys are warm, so that they can survive it. If a job does not
recover from a fault within the limit in bench/chaos/fault_table.py, the run ends early. At the end, all jobs
must have succeeded with the same weights, optimizers and random states as the undisturbed run, and none of
their objects may be left.

The seed determines the order of the faults, their targets and times. The exit code is 1 if a target is
missed. Ctrl-C restores all nodes and removes the jobs.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path

from bench.chaos import report
from bench.chaos.chaos_run import ChaosRun
from bench.chaos.chaos_schedule import schedule
from bench.chaos.fault_table import CHAOS_FAULTS, usable
from bench.chaos.job_table import CHAOS_JOBS
from bench.chaos.repairs import DueRepairs
from bench.chaos.report import ChaosOutcome
from bench.cluster import installation
from bench.harness import results
from bench.harness.console import make_parser, say
from bench.text import all_met
from holdfast.errors import BadInput
from tests.cluster.apparatus.bucket import address
from tests.cluster.apparatus.dry_run import has_settings, without_dry_run
from tests.cluster.apparatus.kubernetes_cluster import ClusterUnderTest
from tests.cluster.apparatus.namespaces import Namespaces
from tests.s3server.server import ObjectServer, serving

NODES = 3


def main(argv: Sequence[str]) -> int:
    options = _parse(argv)
    kinds, left_out = usable(os.environ)
    if options.kinds:
        kinds = tuple(kind for kind in kinds if kind in options.kinds)
        left_out = tuple(line for line in left_out if any(f" {kind}," in line for kind in options.kinds))
    if not kinds:
        raise BadInput(f"no fault can be injected; {'; '.join(left_out)}")
    planned = schedule(options.seed, kinds, CHAOS_JOBS, options.double)
    if options.show:
        for each in itertools.islice(planned, options.show):
            say(each.line)
        return 0
    installation.check()
    outcome = ChaosOutcome(left_out=left_out)
    found = results.begin("chaos")
    for line in left_out:
        say(line)
    with _apparatus() as (cluster, namespaces, repairs):
        nodes = _ready_nodes(cluster)
        interrupted = False
        try:
            with _storage(cluster) as storage:
                run = ChaosRun(cluster, namespaces, storage, repairs, nodes, outcome)
                run.train_undisturbed(options.minutes)
                run.chaos(planned, options.minutes)
                run.conclude()
        except KeyboardInterrupt:
            interrupted, outcome.problem = True, "interrupted"
        except (AssertionError, OSError, BadInput, subprocess.SubprocessError) as error:
            outcome.problem = f"{type(error).__name__}: {error}"
        outcome.left_behind += repairs.carry_out_all()
        outcome.left_behind += _remove(namespaces)
    code = _end(found, outcome, options)
    return 130 if interrupted else code


@contextmanager
def _apparatus() -> Iterator[tuple[ClusterUnderTest, Namespaces, DueRepairs]]:
    """Yield access to the cluster. At the end, always undo the faults and remove the namespaces."""
    cluster = ClusterUnderTest()
    namespaces, repairs = Namespaces(cluster), DueRepairs()
    try:
        # In a dry run, the pods that the webhook missed would stay, and their jobs would wait.
        with nullcontext() if has_settings(cluster) else without_dry_run(cluster):
            yield cluster, namespaces, repairs
    finally:
        repairs.carry_out_all()
        _remove(namespaces)
        cluster.close()


@contextmanager
def _storage(cluster: ClusterUnderTest) -> Iterator[ObjectServer]:
    """Yield object storage on this machine, where faults of nodes do not affect it."""
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder, "objects"), address(cluster)) as made:
        yield made


def _ready_nodes(cluster: ClusterUnderTest) -> list[str]:
    """Return the nodes that can run pods. Raises `BadInput` if there are too few."""
    found = []
    for node in cluster.read("/api/v1/nodes")["items"]:
        ready = [each["status"] for each in node["status"].get("conditions", ()) if each["type"] == "Ready"]
        if ready == ["True"] and not node["spec"].get("unschedulable") and not node["spec"].get("taints"):
            found.append(node["metadata"]["name"])
    if len(found) < NODES:
        raise BadInput(f"{len(found)} nodes can run pods ({', '.join(found) or 'none'}); chaos needs {NODES}")
    return found


def _remove(namespaces: Namespaces) -> list[str]:
    try:
        namespaces.delete_all()
    except (AssertionError, OSError) as error:
        return [f"namespaces: {error}"]
    return []


def _end(found: dict[str, object], outcome: ChaosOutcome, options: argparse.Namespace) -> int:
    judged = report.verdicts(outcome)
    lines = [*report.report_lines(outcome, options.seed), "", *(each.line for each in judged)]
    say("\n" + "\n".join(lines))
    found.update(
        options=vars(options),
        outcome=asdict(outcome),
        verdicts=[asdict(each) for each in judged],
    )
    path = results.write(found)
    text = path.with_suffix(".txt")
    text.write_text("\n".join([*lines, "", *outcome.evidence]) + "\n")
    say(f"the report: {text.relative_to(results.ROOT)}")
    return 0 if all_met(judged) else 1


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = make_parser(
        "chaos", __doc__ or "", "the next faults, without a cluster: python -m bench chaos --show 20"
    )
    add = parser.add_argument
    add("--minutes", type=float, default=60.0, help="how long to inject faults")
    add("--seed", type=int, default=0, help="seed of the faults, their targets and times")
    add("--double", type=float, default=0.2, metavar="P", help="probability of a second fault soon after")
    add("--kinds", nargs="+", choices=tuple(CHAOS_FAULTS), default=[], metavar="KIND",
        help=f"only these faults: {', '.join(CHAOS_FAULTS)}; default: all")  # fmt: skip
    add("--show", type=int, default=0, metavar="N", help="only print the first N faults of the schedule")
    options = parser.parse_args(argv)
    if options.minutes <= 0:
        parser.error("--minutes: expected more than 0")
    return options

"""`python -m bench cluster-nodes`: measure how a job with a standby survives node faults, and what it costs.

The cluster is the one in KUBECONFIG. Holdfast, Kubeflow's training operator and the image
holdfast-trainer:dev must be installed there, on at least three nodes. Set each of these variables to a
command. The bench appends the name of a node, and the command must do this to the node:

    HOLDFAST_NODE_KILL, HOLDFAST_NODE_START    cut its power immediately; boot it
    HOLDFAST_NODE_CUT, HOLDFAST_NODE_HEAL      disconnect it from the network; connect it again

To raise an Xid, the bench restarts the node agents with a stand-in for NVML, which needs a C compiler on this
machine. It also switches the quarantine's dry run off until the bench ends.

If something is missing, the bench reports it and exits with code 2 before it creates anything. No matter how
the bench ends, it starts and reconnects all nodes and deletes everything that it has created.

A PyTorchJob trains from the first fault to the last. It has two pods with one rank each, on different nodes,
and a standby on a third node. At every 50th step, its weights are compared with the weights of an undisturbed
run under torchrun. Each time is measured from the start of the command that causes the fault until this
machine has received the line about the first new step from every rank. It therefore includes the time until
the command takes effect, and the time that the line takes through the API server.

The faults also disturb other users' pods on the same nodes. Do not run this on a cluster that others use.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

from bench import text
from bench.cluster import installation
from bench.cluster.nodes import node_commands, node_report, rest_cost
from bench.cluster.nodes.disturbed_job import DisturbedJob
from bench.cluster.nodes.fake_gpus import fake_gpus, require_fake_gpus
from bench.cluster.nodes.node_commands import NodeCommands
from bench.cluster.nodes.node_faults import FaultyCluster
from bench.cluster.nodes.node_report import MeasuredFault, RestCost, WeightComparison
from bench.cluster.nodes.training_record import compared, differing_digests
from bench.harness import results
from bench.harness.console import make_parser, say
from tests.cluster.apparatus.kubernetes_cluster import ClusterUnderTest
from tests.cluster.apparatus.node_processes import NodeProcesses

NODES = 3
INTERRUPTED = "the bench was interrupted"


@dataclass(slots=True)
class NodeFindings:
    """What has been measured so far. `failures` are the reasons why parts of the bench ended early."""

    faults: list[MeasuredFault] = field(default_factory=list)
    weights: list[WeightComparison] = field(default_factory=list)
    cost: RestCost | None = None
    failures: list[str] = field(default_factory=list)


class ClusterNodesBench:
    """The jobs of one bench, each in a separate namespace. `close` deletes the namespaces."""

    def __init__(
        self, cluster: ClusterUnderTest, commands: NodeCommands, options: argparse.Namespace
    ) -> None:
        self.found = NodeFindings()
        self._cluster, self._options = cluster, options
        self._faulty = FaultyCluster(cluster, commands, options.patience, self._note)
        self._name = f"holdfast-bench-{int(time.time())}"
        self._tools = f"{self._name}-tools"  # the namespace of pods that signal processes on nodes
        self._jobs: list[DisturbedJob] = []

    def close(self) -> None:
        for job in self._jobs:
            job.close()
        self._cluster.kubectl("delete", "namespace", self._tools, "--wait=false", "--ignore-not-found")

    def measure(self, nodes: Sequence[str]) -> None:
        """Cause all faults, and collect the results in `found`. A job that does not recover ends its part."""
        parts: list[Callable[[Sequence[str]], None]] = []
        if any(self._counts_with_standby()) or self._options.rest:
            parts.append(self._measure_with_standby)
        if self._options.bare:
            parts.append(self._measure_without_standby)
        for part in parts:
            try:
                part(nodes)
            except (AssertionError, RuntimeError, subprocess.TimeoutExpired) as error:
                self.found.failures.append(str(error))
                say(f"ended early: {str(error).splitlines()[0]}")
                while self._jobs:
                    self._jobs.pop().close()

    def _measure_with_standby(self, nodes: Sequence[str]) -> None:
        options = self._options
        job = self._job("standby", standbys=1)
        job.ready()
        if options.rest:
            self.found.cost = rest_cost.measure(self._cluster, nodes, job.standbys(), options.rest)
            say(node_report.cost_rows(self.found.cost))
        self._do_all(job)
        if options.verdicts:
            with fake_gpus(self._cluster, list(nodes)) as gpus:
                for number in range(options.verdicts):
                    self._faulty.verdict(job, number, gpus)
        for number in range(options.preemptions):
            self._faulty.preempt(job, number)
        self._compare("job with a standby", job)

    def _measure_without_standby(self, _nodes: Sequence[str]) -> None:
        job = self._job("bare", standbys=0)
        for number in range(self._options.bare):
            self._faulty.kill_without_standby(job, number)
        self._compare("job without a standby", job)

    def _counts_with_standby(self) -> tuple[int, ...]:
        given = self._options
        nodes = (given.kills, given.leader_nodes, given.cuts, given.leader_cuts)
        return (*nodes, given.drains, given.preemptions, given.leaders, given.verdicts)

    def _do_all(self, job: DisturbedJob) -> None:
        options, faulty = self._options, self._faulty
        processes = NodeProcesses(self._cluster, self._tools)
        if options.leaders:
            self._cluster.kubectl("create", "namespace", self._tools)
        todo: list[tuple[int, Callable[[int], None]]] = [
            (options.kills, lambda number: faulty.kill(job, number)),
            (options.cuts, lambda number: faulty.cut(job, number)),
            (options.drains, lambda number: faulty.drain(job, number)),
            (options.leaders, lambda _: faulty.kill_leader(job, processes)),
            (options.leader_nodes, lambda number: faulty.kill(job, number, with_leader=True)),
            (options.leader_cuts, lambda number: faulty.cut(job, number, with_leader=True)),
        ]
        for count, fault in todo:
            for number in range(count):
                fault(number)

    def _job(self, name: str, standbys: int) -> DisturbedJob:
        job = DisturbedJob(self._cluster, f"{self._name}-{name}", standbys, self._options.pace)
        self._jobs.append(job)
        return job

    def _note(self, fault: MeasuredFault) -> None:
        self.found.faults.append(fault)
        say(node_report.fault_line(fault))

    def _compare(self, name: str, job: DisturbedJob) -> None:
        """End a job, compare its weights, and wait until it is deleted."""
        ended = job.finish()
        expected, found = job.reference(), job.log.digests
        differing = tuple(differing_digests(found, expected))
        self.found.weights.append(WeightComparison(name, ended, compared(found, expected), differing))
        job.close()
        job.gone()
        self._jobs.remove(job)


def report(found: NodeFindings) -> bool:
    """Print the table and the verdicts; return False if a target is missed."""
    if found.faults:
        say(f"\n{node_report.rows(found.faults)}")
    if found.cost is not None:
        say(f"\n{node_report.cost_rows(found.cost)}")
    verdicts = node_report.judge(found.faults, found.weights, found.cost)
    say()
    for each in verdicts:
        say(each.line)
    for why in found.failures:
        say(f"ended early: {why}")
    return text.all_met(verdicts) and not found.failures


def parsed(argv: Sequence[str]) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = make_parser("cluster-nodes", __doc__ or "")

    def counted(name: str, default: int, about: str) -> None:
        parser.add_argument(name, type=int, default=default, metavar="N", help=about)

    counted("--kills", 4, "number of kills of a member's node")
    counted("--leader-nodes", 1, "number of kills of a member's node that also runs the leading supervisor")
    counted("--bare", 1, "number of kills of a member's node in a job without a standby")
    counted("--cuts", 1, "number of times that a member's node is cut off from the network for 60 s")
    counted(
        "--leader-cuts", 1, "number of such cuts of a member's node that also runs the leading supervisor"
    )
    counted("--drains", 2, "number of drains of a member's node")
    counted("--preemptions", 1, "number of preemptions of a member's pod")
    counted("--leaders", 2, "number of kills of the leading supervisor's process")
    counted("--verdicts", 1, "number of Xids on a member's node; for these, the agents see fake GPUs")
    parser.add_argument(
        "--rest",
        type=float,
        default=60.0,
        metavar="S",
        help="how long to measure the cost at rest; 0: not at all",
    )
    parser.add_argument("--pace", type=float, default=0.05, metavar="S", help="pause after each step")
    parser.add_argument(
        "--patience", type=float, default=120.0, metavar="S", help="time limit for each recovery"
    )
    parser.add_argument("--strict", action="store_true", help="exit with code 1 if a target is missed")
    return parser.parse_args(argv)


def needed_commands(options: argparse.Namespace) -> list[str]:
    """Return what the commands in the environment must be able to do."""
    kills = options.kills or options.leader_nodes or options.bare
    return [
        *(("kill", "start") if kills else ()),
        *(("cut", "heal") if options.cuts or options.leader_cuts else ()),
    ]


def main(argv: Sequence[str]) -> int:
    options = parsed(argv)
    commands = node_commands.from_environment(os.environ, needed_commands(options))
    installation.check()
    nodes = installation.ready_nodes(NODES)
    cluster = ClusterUnderTest()
    try:
        if options.verdicts:
            require_fake_gpus(cluster)
        stored = results.begin("cluster-nodes")
        say(f"nodes: {', '.join(nodes)}")
        bench = ClusterNodesBench(cluster, commands, options)
        try:
            with commands:
                bench.measure(nodes)
        except KeyboardInterrupt:
            bench.found.failures.append(INTERRUPTED)
        finally:
            bench.close()
    finally:
        cluster.close()
    is_met = report(bench.found)
    stored["faults"] = [asdict(each) for each in bench.found.faults]
    stored["weights"] = [asdict(each) for each in bench.found.weights]
    stored["rest"] = bench.found.cost.cores if bench.found.cost is not None else None
    stored["failures"] = bench.found.failures
    results.write(stored)
    if INTERRUPTED in bench.found.failures:
        return 130
    return 0 if is_met or not options.strict else 1

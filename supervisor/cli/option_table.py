"""Define all commands' options in one table. Parser, messages and help are derived from it. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from holdfast.protocol.drills import DRILLS
from supervisor.options.plan_options import PLAN
from supervisor.options.run_options import RUN, TORCHRUN_OPTIONS, Option, TorchrunOption
from supervisor.options.value_types import (
    ValueType,
    choice,
    context,
    directory,
    file,
    image,
    job,
    namespace,
    node,
    pod,
    reason,
    whole_number,
)

IMAGE = "holdfast:dev"  # the default for the containers that are added to a pod

_OPTIONS, _CLUSTER = "Options", "Kubernetes cluster"
_JOB = Option(("--job",), "job", job, "[NAMESPACE/]NAME", _CLUSTER,
              "job on a cluster, as listed by `holdfast jobs`", "a run on this machine")  # fmt: skip
_CONTEXT = Option(("--context",), "context", context, "NAME", _CLUSTER,
                  "context of the kubeconfig, as in kubectl", "the current context")  # fmt: skip
_IN = Option(("-n", "--namespace"), "namespace", namespace, "NAMESPACE", _CLUSTER,
             "namespace, as in kubectl", "the context's")  # fmt: skip
_ON_CLUSTER = (_JOB, _CONTEXT, _IN)
_ALL = Option(("-A", "--all-namespaces"), "all_namespaces", None, "", _CLUSTER,
              "list the jobs of all namespaces")  # fmt: skip
_IMAGE = Option(("--image",), "image", image, "IMAGE", _OPTIONS,
                "image for the added containers", IMAGE)  # fmt: skip
_DIR = Option(("--run-dir",), "run_dir", directory, "DIR", _OPTIONS,
              "directory of the run", "the newest run in holdfast-runs")  # fmt: skip
_LIVING = Option(("--run-dir",), "run_dir", directory, "DIR", _OPTIONS,
                 "directory of the run", "the run in progress in holdfast-runs")  # fmt: skip
_JSON = Option(("--json",), "json", None, "", _OPTIONS, "print JSON")
_RANK = Option(("--rank",), "rank", whole_number(0, 1_000_000), "R", _OPTIONS,
               "rank to break; with member or sidecar, a rank of that member", "0", "rank")  # fmt: skip
_VERIFY = Option(("--verify",), "verify", None, "", _OPTIONS,
                 "read every byte and compare checksums, not only sizes")  # fmt: skip
_NOW = Option(("--now",), "now", None, "", _OPTIONS, "stop immediately, without a final checkpoint")
_KEEP = Option(("--keep",), "keep", None, "", _OPTIONS,
               "keep the run directories; with --cluster, the jobs and the installation")  # fmt: skip
_CLUSTER_DEMO = Option(("--cluster",), "cluster", None, "", _CLUSTER,
                       "break a job in pods, on the cluster that the kubeconfig selects")  # fmt: skip
_OUTPUT = Option(("-o", "--output"), "output", choice("table", "json"), "FORMAT", _OPTIONS,
                 "format of the output, as in kubectl; --json is the same as -o json", "table")  # fmt: skip
_WHY = Option(("--why",), "why", reason, "TEXT", _OPTIONS,
              "reason for the quarantine, which requires one and shows it to all users", "none")  # fmt: skip
_DRAIN = Option(("--drain",), "drain", None, "", _OPTIONS,
                "move jobs off the quarantined node")  # fmt: skip
_QUICK = Option(("--quick",), "quick", None, "", _OPTIONS,
                "train a smaller model with three faults, in about half a minute")  # fmt: skip
_WHERE = Option(("--run-dir",), "run_dir", directory, "DIR", _OPTIONS,
                "parent directory of the two runs, which are kept", "a temporary directory")  # fmt: skip


def _by_rank(_: str) -> str:
    return "one of the member's ranks, as in `holdfast inject member --rank R`"


@dataclass(frozen=True, slots=True)
class Argument:
    """A positional argument of a command."""

    metavar: str
    field: str
    value: ValueType
    optional: bool = False

    @property
    def usage(self) -> str:
        return f"[{self.metavar}]" if self.optional else self.metavar


@dataclass(frozen=True, slots=True)
class CommandSpec:
    """One command.

    `summary` is its line in the list of commands, and `about` is the text above its options.
    """

    summary: str
    options: tuple[Option, ...]
    examples: tuple[tuple[str, str], ...]  # each consists of a command line and what it does
    about: str = ""
    arguments: tuple[Argument, ...] = ()
    foreign: tuple[TorchrunOption, ...] = ()


_INCIDENT = ValueType("word", "an incident from `holdfast incidents`, such as 3, i-0003 or last", str)

_RUN_ABOUT = """\
COMMAND is what you would pass to torchrun: `python train.py ARGS`, `train.py ARGS`, `-m MODULE ARGS`,
or any other program. Put holdfast's options before COMMAND; all arguments after it go to the script.
torchrun's spellings of shared options and its PET_* variables are accepted.

If a rank crashes, hangs or computes a NaN, holdfast restarts what is needed. Training resumes from
the newest state that survives in memory or, if none does, from the newest checkpoint. Ctrl-C saves
a checkpoint and stops the run; a second Ctrl-C, at least 1 s later, stops the run immediately. The
exit code is the script's; it is 130 after Ctrl-C and 2 for bad input.

A TIME is a number with a unit, such as 250ms, 30s, 5m, 2h or 1d, or a plain number of seconds."""

_STATUS_ABOUT = """\
Prints the step, the loss, what is saved, the last incident, the state of each rank, and where the
time went. Works during and after a run."""

_INCIDENTS_ABOUT = """\
Prints for each incident what happened, to which rank, at which step, how long it took to notice and
to recover, how many steps were lost, and the remedy. `holdfast explain ID` prints one incident in
full."""

_EXPLAIN_ABOUT = """\
ID is an incident from `holdfast incidents`: i-0003, 3 or last. Prints the evidence, the decision
and its reason, the time that each part of the recovery took, and the stacks of hung ranks."""

_CHECKPOINTS_ABOUT = """\
Lists the newest first. The exit code is 1 if any checkpoint is damaged."""

_STOP_ABOUT = """\
Waits until the run has ended. The exit code is 1 if this takes too long. Ctrl-C ends only this
command, and the run still stops.

On a cluster, this ends the training, but not the owner of the pods. The owner may create new pods
until its own limits are reached; Holdfast ends these pods too, until you remove the request. The
command prints what the owner does next, and the kubectl commands that delete, suspend or resume it.
Without holdfast.dev/checkpoints, no checkpoint is saved, and the state is lost with the pods."""


def _in_two_columns(rows: Mapping[str, str]) -> str:
    cells = [f"{name:<12}{text}" for name, text in rows.items()]
    half = (len(cells) + 1) // 2
    pairs = itertools.zip_longest(cells[:half], cells[half:], fillvalue="")
    return "\n".join(f"  {left:<48}{right}".rstrip() for left, right in pairs)


_DRILLS = f"""\
Use it to see how your training recovers. KIND is one of
{_in_two_columns({name: each.description for name, each in DRILLS.items()})}"""

_DEMO_ABOUT = """\
Trains the model twice: once undisturbed, and once with nine injected faults (three with --quick).
Prints how the run recovered from each fault, and compares the final weights bit for bit. Needs
torch and numpy. The exit code is 0 only if the run recovered from every fault and the weights are
equal.

With --cluster, the demo installs Holdfast in the cluster unless it is already installed, injects
faults into a Job of two pods, and compares the Job's weights with those of an undisturbed Job under
torchrun. At the end, or after Ctrl-C, it removes everything that it created. This needs kubectl and
a checkout of Holdfast."""

_JOBS_ABOUT = """\
Each line is a Supervision, the resource that Holdfast's supervisor keeps for a job. The commands
status, incidents, explain, checkpoints, stop and inject take its name as --job. They access the API
server with your own permissions: the `view` ClusterRole is enough to read jobs, and `edit` to change
them."""

_DOCTOR_ABOUT = """\
Checks the installation, your rights, the namespace and its pods. Prints a line for each check, and a
remedy for each problem. The exit code is 1 if any problem was found."""

_NODES_ABOUT = """\
Lists the nodes that have a node agent: their state, the worst finding, the next action and, if nothing
is being done, the reason. ACTION is one of
  explain     print everything that is known about NODE, and what must happen before its release
  release     end the quarantine of NODE, and ignore its current findings for 7 days
  quarantine  keep new work off NODE until it is released with `holdfast nodes release`

The states are healthy, degraded (keeps its work), suspect (a fault is not confirmed yet), held (a
confirmed fault, but a storm or the breaker prevents the quarantine), quarantined, waived (released by
an operator despite its findings) and unknown (its agent is silent). The list is computed from the Node
objects with your own permissions, and works even while the supervisor is down. Requests require
permission to patch nodes; the supervisor carries them out. The exit code is 1 if the supervisor does
not do so in time."""

_MANIFEST_ABOUT = """\
FILE is a manifest, or - for standard input. Adds Holdfast to each pod template that has the
annotation holdfast.dev/inject: "true" and prints the result. Prints a note about each of these
templates to stderr. The CA certificate that sidecars need to verify the supervisor is omitted,
because only the webhook has it. The exit code is 1 if a template with the annotation cannot be
injected. It is 2, and nothing is printed to stdout, if no pod template has the annotation."""

_PLAN_ABOUT = """\
Prints how much of the time the job trains with each number of standbys, and what that costs. Also
prints which number has the cheapest useful GPU hour, how often to write checkpoints, and what would
change the answer. Nothing is started, and no cluster is contacted.

A standby is a node that is ready but does not train. Without standbys, all nodes wait while a single
node is repaired. Each standby occupies a node all the time.

The defaults come from Meta's training of Llama 3 (arXiv 2407.21783): 419 unexpected interruptions,
350 of which took a node away, and three manual interventions in 54 days on 16,384 GPUs; at most
4 GB of state per GPU; and storage that writes 2 TB/s. The detection and recovery times are the
limits that Holdfast is designed for. The repair time, the step time and the slowdown are
assumptions: replace them with your own values. docs/sizing.md has the formulas.

A TIME is a number with a unit, such as 30s, 5m, 50000h, 90d or 3y (a year has 365 days)."""

# The node agent's commands, which `holdfast` dispatches before it calls the supervisor's parser.
NEIGHBOURS: Mapping[str, str] = MappingProxyType(
    {"node": "monitor the GPUs and the host of this node, and recommend what to do about faults"}
)

COMMANDS: Mapping[str, CommandSpec] = MappingProxyType(
    {
        "run": CommandSpec(
            "run a training command and keep it going through faults",
            RUN,
            (
                ("holdfast run --nproc-per-node 2 -- python train.py --lr 0.1", "two ranks"),
                ("holdfast run --nproc_per_node=2 train.py --lr 0.1", "the same in torchrun's spelling"),
                ("holdfast run --nproc-per-node 4 --members 2 --standby 1 -m pkg.train",
                 "two members with four ranks each, and one standby"),
                ("holdfast run --run-dir runs/a -- python train.py",
                 "start a run in runs/a, or resume the run in it"),
            ),
            _RUN_ABOUT,
            foreign=TORCHRUN_OPTIONS,
        ),
        "status": CommandSpec(
            "show what a run is doing, and where its time went",
            (_DIR, _JSON, *_ON_CLUSTER),
            (
                ("holdfast status", "the newest run here"),
                ("holdfast status --json | jq .step", "the step, for a script"),
                ("holdfast status --job research/gpt", "a job on a cluster"),
            ),
            _STATUS_ABOUT,
        ),
        "incidents": CommandSpec(
            "list the incidents of a run, one per line",
            (_DIR, _JSON, *_ON_CLUSTER),
            (
                ("holdfast incidents", "a table"),
                ("holdfast incidents --json | jq '.[].recovered_s'", "the time that each recovery took"),
                ("holdfast incidents --job gpt -n research", "the incidents of a job on a cluster"),
            ),
            _INCIDENTS_ABOUT,
        ),
        "explain": CommandSpec(
            "explain one incident: evidence, decision, timeline, stacks",
            (_DIR, _JSON, *_ON_CLUSTER),
            (
                ("holdfast explain i-0003", "one incident"),
                ("holdfast explain last", "the newest incident"),
                ("holdfast explain last --job research/gpt", "the newest incident of a job on a cluster"),
            ),
            _EXPLAIN_ABOUT,
            (Argument("ID", "incident", _INCIDENT),),
        ),
        "checkpoints": CommandSpec(
            "list the checkpoints of a run, and check them for damage",
            (_VERIFY, _DIR, _JSON, *_ON_CLUSTER),
            (
                ("holdfast checkpoints", "compare sizes: fast"),
                ("holdfast checkpoints --verify", "read every byte"),
                ("holdfast checkpoints --job research/gpt", "the checkpoints that a job's pods report"),
            ),
            _CHECKPOINTS_ABOUT,
        ),
        "stop": CommandSpec(
            "save a checkpoint and stop a run",
            (_NOW, _LIVING, _JSON, *_ON_CLUSTER),
            (
                ("holdfast stop", "save a checkpoint, then stop"),
                ("holdfast stop --now", "stop without saving"),
                ("holdfast stop --job research/gpt", "the same for a job on a cluster"),
            ),
            _STOP_ABOUT,
        ),
        "inject": CommandSpec(
            "inject a fault into a run, as a drill",
            (_RANK, _LIVING, _JSON, *_ON_CLUSTER),
            (
                ("holdfast inject kill --rank 1", "kill rank 1"),
                ("holdfast inject member --rank 2", "kill the member that has rank 2"),
                ("holdfast inject kill --job research/gpt", "kill rank 0 of a job on a cluster"),
            ),
            _DRILLS,
            (Argument("KIND", "kind", choice(*DRILLS)),),
            (TorchrunOption(("--member", "--members"), True, "", _by_rank),),
        ),
        "jobs": CommandSpec(
            "list the supervised jobs on a Kubernetes cluster",
            (_ALL, _CONTEXT, _IN, _JSON),
            (
                ("holdfast jobs", "the jobs in the context's namespace"),
                ("kubectl holdfast jobs -A", "the jobs in all namespaces, through the kubectl plugin"),
                ("holdfast jobs -n research --json | jq '.[].phase'", "the phases, for a script"),
            ),
            _JOBS_ABOUT,
        ),
        "doctor": CommandSpec(
            "find out why Holdfast does not supervise a pod",
            (_CONTEXT, _IN, _JSON),
            (
                ("holdfast doctor", "the installation, and all pods of the namespace"),
                ("holdfast doctor gpt-worker-0 -n research", "the installation, and one pod"),
            ),
            _DOCTOR_ABOUT,
            (Argument("POD", "pod", pod, optional=True),),
        ),
        "nodes": CommandSpec(
            "list the nodes of a cluster, and quarantine or release one",
            (_OUTPUT, _WHY, _DRAIN, _CONTEXT, _JSON),
            (
                ("holdfast nodes", "all nodes, and the breaker"),
                ("holdfast nodes explain gpu-17", "the evidence against one node"),
                ("holdfast nodes release gpu-17", "return it to service now"),
                ('holdfast nodes quarantine gpu-17 --why "loud fan" --drain', "take it out, move the jobs"),
            ),
            _NODES_ABOUT,
            (
                Argument("ACTION", "action", choice("explain", "release", "quarantine"), optional=True),
                Argument("NODE", "node", node, optional=True),
            ),
        ),
        "inject-manifest": CommandSpec(
            "add Holdfast to the pod templates of a manifest, without a cluster",
            (_IMAGE,),
            (
                ("holdfast inject-manifest job.yaml", "print the injected manifest"),
                ("holdfast inject-manifest job.yaml | diff job.yaml -", "what would be added"),
            ),
            _MANIFEST_ABOUT,
            (Argument("FILE", "file", file),),
        ),
        "plan": CommandSpec(
            "compute how many standbys and which checkpoint interval a job needs",
            PLAN,
            (
                ("holdfast plan --nodes 64", "64 nodes of 8 GPUs, with Llama 3's faults"),
                ("holdfast plan --nodes 64 --replacement 10m", "in a cluster that has free nodes"),
                ("holdfast plan --nodes 512 --mtbf 50000h --repair 5d", "better nodes, slower repairs"),
                ("holdfast plan --nodes 16 --state 1.5TB --checkpoint-bandwidth 2GB/s", "your own storage"),
                ("holdfast plan --nodes 64 --gpu-hour-cost 2.50 --standbys 1", "the price of one standby"),
                ("holdfast plan --nodes 64 --json | jq .recommended", "the number, for a script"),
            ),
            _PLAN_ABOUT,
        ),
        "demo": CommandSpec(
            "train a small GPT, break it nine times, and compare the weights",
            (_WHERE, _KEEP, _QUICK, _CLUSTER_DEMO, _CONTEXT),
            (
                ("holdfast demo --quick", "about half a minute"),
                ("holdfast demo", "a few minutes"),
                ("holdfast demo --cluster", "on a Kubernetes cluster, under five minutes"),
            ),
            _DEMO_ABOUT,
        ),
    }
)  # fmt: skip

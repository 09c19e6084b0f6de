"""The options of `holdfast plan`. Pure."""

from __future__ import annotations

from supervisor.options.run_options import Option
from supervisor.options.value_types import duration, number, rate, share, size, span, whole_number
from supervisor.planning import published
from supervisor.planning.planner import MOST

AUTO = -1  # the value of --standbys auto
SEED = 1

_DAY_S, _YEAR_S = published.DAY_S, 365 * published.DAY_S
_JOB, _FAULTS, _CHECKPOINTS, _OUTPUT = "Job", "Faults", "Checkpoints", "Output"
_LONG = duration(3600, 100 * _YEAR_S)
_SHORT = duration(0, _DAY_S)

PLAN = (
    Option(("--nodes",), "nodes", whole_number(1, 100_000), "N", _JOB,
           "number of nodes that train; standbys are additional", unit="nodes", required=True),
    Option(("--gpus-per-node",), "gpus_per_node", whole_number(1, 1024), "N", _JOB,
           "number of GPUs per node", str(published.GPUS_PER_NODE), "GPUs"),
    Option(("--step",), "step_s", duration(0.001, _DAY_S), "TIME", _JOB,
           "duration of a training step; each fault loses one step", span(published.STEP_S)),
    Option(("--standbys",), "standbys", whole_number(0, MOST, {"auto": AUTO}), "K", _JOB,
           "number of standbys; auto chooses the one with the cheapest useful GPU hour", "auto", "standbys"),
    Option(("--gpu-hour-cost",), "gpu_hour_cost", number(0.0001, 100_000), "PRICE", _JOB,
           "price of a GPU hour in any currency", "costs are given in GPU hours", "price"),
    Option(("--mtbf",), "mtbf_s", _LONG, "TIME", _FAULTS,
           "mean time between faults of one node while it trains", f"{published.MTBF_S / _DAY_S:g}d"),
    Option(("--node-loss",), "node_loss", share, "SHARE", _FAULTS,
           "share of faults after which the node must be repaired", f"{published.NODE_LOSS:.0%}",
           "share"),
    Option(("--repair",), "repair_s", duration(60, _YEAR_S), "TIME", _FAULTS,
           "mean time until a lost node is back", span(published.REPAIR_S)),
    Option(("--replacement",), "replacement_s", duration(1, _YEAR_S), "TIME", _FAULTS,
           "mean time until another node replaces a lost one, if the cluster has free nodes",
           "no free nodes"),
    Option(("--detection",), "detection_s", _SHORT, "TIME", _FAULTS,
           "time from a fault to its detection", span(published.DETECTION_S)),
    Option(("--recovery",), "recovery_s", _SHORT, "TIME", _FAULTS,
           "time from the detection to the first new step, if a standby is ready",
           span(published.RECOVERY_S)),
    Option(("--outage",), "outage_s", _LONG, "TIME", _FAULTS,
           "mean time between events that destroy all copies of the state in memory, such as a power failure",
           f"{published.OUTAGE_S / _DAY_S:g}d"),
    Option(("--state",), "state_bytes", size, "SIZE", _CHECKPOINTS,
           "size of a checkpoint", f"{published.STATE_PER_GPU / 1e9:g}GB for each GPU"),
    Option(("--checkpoint-bandwidth",), "bandwidth", rate, "RATE", _CHECKPOINTS,
           "speed at which the job writes a checkpoint",
           f"{published.BANDWIDTH_PER_GPU / 1e6:.0f}MB/s for each GPU"),
    Option(("--checkpoint-slowdown",), "slowdown", share, "SHARE", _CHECKPOINTS,
           "share of the training speed that is lost while a checkpoint is written",
           f"{published.CHECKPOINT_SLOWDOWN:.0%}", "share"),
    Option(("--simulate",), "simulate", None, "", _OUTPUT,
           "compare the formulas with a simulation of faults and repairs"),
    Option(("--seed",), "seed", whole_number(0, 1_000_000_000), "N", _OUTPUT,
           "seed of the simulation", str(SEED), "seed"),
    Option(("--json",), "json", None, "", _OUTPUT, "print JSON"),
)  # fmt: skip

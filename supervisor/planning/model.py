"""The inputs and the results of a plan. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from supervisor.planning import published


@dataclass(frozen=True, slots=True)
class SizingInputs:
    """A job, its nodes and their faults.

    Attributes:
        nodes: The nodes that train; standbys are additional.
        mtbf_s: The mean time between faults of one node while it trains.
        node_loss: The share of faults in which the node is lost. The job recovers from all others in place.
        repair_s: The mean time until a lost node is back.
        replacement_s: The mean time until another node takes its place; None if there are no other nodes.
        detection_s: The time from a fault to its detection.
        recovery_s: The time from the detection to the first new step, if there is a node for every rank.
        step_s: The duration of a step. One step is lost with each fault.
        state_bytes: The size of a checkpoint.
        bandwidth: The bytes per second at which the job writes and reads a checkpoint.
        slowdown: The share of the training speed that is lost while a checkpoint is written.
        outage_s: The mean time between events that destroy all copies of the state in memory.
        gpu_hour_cost: The price of a GPU hour; None if unknown.
    """

    nodes: int
    gpus_per_node: int = published.GPUS_PER_NODE
    mtbf_s: float = published.MTBF_S
    node_loss: float = published.NODE_LOSS
    repair_s: float = published.REPAIR_S
    replacement_s: float | None = None
    detection_s: float = published.DETECTION_S
    recovery_s: float = published.RECOVERY_S
    step_s: float = published.STEP_S
    state_bytes: float | None = None
    bandwidth: float | None = None
    slowdown: float = published.CHECKPOINT_SLOWDOWN
    outage_s: float = published.OUTAGE_S
    gpu_hour_cost: float | None = None

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def fault_rate(self) -> float:
        """The faults of the job per second of training."""
        return self.nodes / self.mtbf_s

    @property
    def loss_rate(self) -> float:
        """The lost nodes of the job per second of training."""
        return self.fault_rate * self.node_loss

    @property
    def refill_s(self) -> float:
        """The mean time until a lost node is repaired or replaced by another node."""
        return self.repair_s if self.replacement_s is None else min(self.repair_s, self.replacement_s)

    @property
    def offered(self) -> float:
        """The mean number of nodes that would be missing if training never waited."""
        return self.loss_rate * self.refill_s

    @property
    def write_s(self) -> float:
        """The time to write, or to read, one checkpoint."""
        state = published.STATE_PER_GPU * self.gpus if self.state_bytes is None else self.state_bytes
        rate = published.BANDWIDTH_PER_GPU * self.gpus if self.bandwidth is None else self.bandwidth
        return state / rate


@dataclass(frozen=True, slots=True)
class CheckpointPlan:
    """When to write checkpoints.

    Attributes:
        interval_s: The recommended interval between the starts of two checkpoints.
        write_s: The time to write a checkpoint, which is the shortest possible interval.
        cost_s: The training time that a checkpoint costs.
        all_copies_s: The mean time between losses of all copies of the state in memory.
        without_copies_s: The interval that the job would need if it had no copies other than its checkpoints.
    """

    interval_s: float
    write_s: float
    cost_s: float
    all_copies_s: float
    without_copies_s: float


@dataclass(frozen=True, slots=True)
class Outlook:
    """What to expect with a number of standbys.

    The shares are fractions of the elapsed time. Together with `ettr`, they add up to 1.

    Attributes:
        ready: The probability that a lost node finds a standby.
        mean_wait_s: The mean wait for a node if a node is lost and no standby is left.
        standbys_per_day: The cost of the standbys per day, in GPU hours, or in money if the price is known.
        waiting_per_day: The cost of the job's GPUs while they wait, in the same unit.
        cost: What one useful GPU hour costs, in the same unit.
    """

    standbys: int
    ready: float
    mean_wait_s: float
    ettr: float
    waiting: float
    recovering: float
    lost_steps: float
    checkpoints: float
    outages: float
    standbys_per_day: float
    waiting_per_day: float
    cost: float


@dataclass(frozen=True, slots=True)
class Variation:
    """What the plan would recommend if one input were different."""

    change: str
    standbys: int
    ettr: float
    interval_s: float


@dataclass(frozen=True, slots=True)
class SizingPlan:
    """The answer for one job.

    Attributes:
        outlooks: The outlook for each number of standbys, from 0.
        recommended: The number of standbys with the cheapest useful GPU hour.
        for_99: The smallest number of standbys with which 99% of the lost nodes find one.
    """

    inputs: SizingInputs
    outlooks: tuple[Outlook, ...]
    recommended: int
    for_99: int
    checkpoint: CheckpointPlan
    variations: tuple[Variation, ...]

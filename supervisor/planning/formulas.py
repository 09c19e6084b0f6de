"""The formulas of a plan. Pure.

The formulas assume that faults are independent of each other and of the age of the nodes (a Poisson process),
and that they occur only while the job trains. The repair of each lost node begins at once, independently of
the others. A standby does not fail.

With these assumptions, missing nodes behave like the busy lines of a telephone exchange (M/G/c/c). Training
stops while all standbys and one more node are missing. Nothing fails while the job waits, just as a call that
finds all lines busy is lost. Erlang's formula B holds for any distribution of the repair times (Sevastyanov,
1957).
"""

from __future__ import annotations

import math

from supervisor.planning.model import CheckpointPlan, Outlook, SizingInputs

_HOURS_PER_DAY = 24


def erlang_b(lines: int, offered: float) -> float:
    """Return the probability that all of `lines` are busy if `offered` are wanted on average."""
    blocked = 1.0
    for line in range(1, lines + 1):
        blocked = offered * blocked / (line + offered * blocked)
    return blocked


def ready(inputs: SizingInputs, standbys: int) -> float:
    """Return the probability that a lost node finds a standby."""
    return 1.0 - erlang_b(standbys, inputs.offered)


def young(cost_s: float, between_s: float) -> float:
    """Return the interval between checkpoints that costs the least training time.

    J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974.
    Checkpoints at intervals of T cost `cost_s` / T of the time, and each loss costs T / 2 of training. Daly's
    refinement (FGCS 22(3), 2006) gives a different result only if a checkpoint costs much of the time between
    two losses.
    """
    return math.sqrt(2.0 * cost_s * between_s)


def checkpoints(inputs: SizingInputs) -> CheckpointPlan:
    """Return when to write checkpoints, which are needed only if all copies in memory are lost."""
    write_s = inputs.write_s
    cost_s = write_s * inputs.slowdown
    # The probability that the node with the other copy is lost too, before the next step has made a new copy.
    exposed_s = inputs.detection_s + inputs.recovery_s + inputs.step_s
    peer_too = -math.expm1(-exposed_s * inputs.node_loss / inputs.mtbf_s)
    # A single node has no peer, so the only copy is lost with it.
    unlucky = inputs.loss_rate * (peer_too if inputs.nodes > 1 else 1.0)
    all_copies_s = 1.0 / (1.0 / inputs.outage_s + unlucky)
    return CheckpointPlan(
        interval_s=max(write_s, young(cost_s, all_copies_s)),
        write_s=write_s,
        cost_s=cost_s,
        all_copies_s=all_copies_s,
        without_copies_s=max(write_s, young(cost_s, 1.0 / (inputs.fault_rate + 1.0 / inputs.outage_s))),
    )


def outlook(inputs: SizingInputs, standbys: int) -> Outlook:
    """Return what to expect with `standbys`.

    All terms are first computed per second of training, because faults occur only while the job trains. The
    terms are the part of this second that is overhead or has to be repeated, and the additional time for
    which the job is stopped.
    """
    plan = checkpoints(inputs)
    missing = erlang_b(standbys, inputs.offered)
    mean_wait_s = inputs.refill_s / (standbys + 1)  # the first node that comes back ends the wait
    waiting = inputs.loss_rate * missing * mean_wait_s
    recovering = inputs.fault_rate * (inputs.detection_s + inputs.recovery_s)
    overhead = plan.cost_s / plan.interval_s
    outages = 1.0 / plan.all_copies_s
    # The newest whole checkpoint began half an interval and one write ago. Reading it stops the training.
    repeated = outages * (plan.interval_s / 2.0 + plan.write_s)
    reading = outages * plan.write_s
    lost_steps = inputs.fault_rate * inputs.step_s
    wasted = overhead + repeated + lost_steps
    # If all of the time is wasted, nothing useful remains, and the shares must still add up to 1.
    shrink = 1.0 / max(1.0, wasted)
    elapsed = 1.0 + waiting + recovering + reading
    ettr = max(0.0, 1.0 - wasted) / elapsed
    price = 1.0 if inputs.gpu_hour_cost is None else inputs.gpu_hour_cost
    per_day = inputs.gpus_per_node * _HOURS_PER_DAY * price
    return Outlook(
        standbys=standbys,
        ready=1.0 - missing,
        mean_wait_s=mean_wait_s,
        ettr=ettr,
        waiting=waiting / elapsed,
        recovering=recovering / elapsed,
        lost_steps=lost_steps * shrink / elapsed,
        checkpoints=overhead * shrink / elapsed,
        outages=(repeated * shrink + reading) / elapsed,
        standbys_per_day=standbys * per_day,
        waiting_per_day=inputs.nodes * per_day * waiting / elapsed,
        cost=price * (inputs.nodes + standbys) / (inputs.nodes * ettr) if ettr else math.inf,
    )

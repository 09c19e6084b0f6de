"""Choose the number of standbys, and show how the choice depends on the inputs. Pure."""

from __future__ import annotations

import math
from dataclasses import replace

from supervisor.planning.formulas import checkpoints, outlook, ready
from supervisor.planning.model import SizingInputs, SizingPlan, Variation

_ENOUGH = 0.99
MOST = 1000  # standbys; if more were needed, nodes would be lost faster than any pool could replace them


def plan(inputs: SizingInputs, least_rows: int = 0) -> SizingPlan:
    """Return the plan for `inputs`, with the outlooks for at least 0 to `least_rows` standbys."""
    best, for_99 = recommended(inputs), _for_99(inputs)
    rows = max(best + 3, least_rows + 1)
    return SizingPlan(
        inputs=inputs,
        outlooks=tuple(outlook(inputs, standbys) for standbys in range(rows)),
        recommended=best,
        for_99=for_99,
        checkpoint=checkpoints(inputs),
        variations=tuple(_variation(change, each) for change, each in _changes(inputs)),
    )


def recommended(inputs: SizingInputs) -> int:
    """Return the number of standbys with the cheapest useful GPU hour; 0 if nothing helps."""
    # Beyond six standard deviations above the mean number of missing nodes, one more standby never pays off.
    most = min(MOST, math.ceil(inputs.offered + 6.0 * math.sqrt(inputs.offered) + 6.0))
    return min(range(most + 1), key=lambda standbys: outlook(inputs, standbys).cost)


def _for_99(inputs: SizingInputs) -> int:
    return next((each for each in range(MOST) if ready(inputs, each) >= _ENOUGH), MOST)


def _changes(inputs: SizingInputs) -> tuple[tuple[str, SizingInputs], ...]:
    def refill(factor: float) -> SizingInputs:
        if inputs.replacement_s is None:
            return replace(inputs, repair_s=inputs.repair_s * factor)
        return replace(inputs, repair_s=math.inf, replacement_s=inputs.refill_s * factor)

    return (
        ("MTBF halved", replace(inputs, mtbf_s=inputs.mtbf_s / 2.0)),
        ("MTBF doubled", replace(inputs, mtbf_s=inputs.mtbf_s * 2.0)),
        ("lost nodes back in half the time", refill(0.5)),
        ("lost nodes back in twice the time", refill(2.0)),
        ("outages twice as often", replace(inputs, outage_s=inputs.outage_s / 2.0)),
    )


def _variation(change: str, inputs: SizingInputs) -> Variation:
    best = recommended(inputs)
    return Variation(change, best, outlook(inputs, best).ettr, checkpoints(inputs).interval_s)

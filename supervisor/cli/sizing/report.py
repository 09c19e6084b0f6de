"""The output of `holdfast plan`. Pure."""

from __future__ import annotations

import dataclasses
import math
import textwrap
from collections.abc import Mapping
from typing import Any

from supervisor.options.value_types import span
from supervisor.planning.model import Outlook, SizingInputs, SizingPlan
from supervisor.planning.planner import MOST
from supervisor.planning.simulation import Simulated
from supervisor.wording import count, part, percent, seconds, table

SCHEMA = 1
_WIDTH = 100  # columns
_WHOLE_TABLE = 8  # the table has a row for every number of standbys up to this one


def shown(plan: SizingPlan, own: int | None) -> list[int]:
    """Return the numbers of standbys in the table: all small ones, and those around the interesting ones."""
    best = plan.recommended
    around = {best + more for more in range(-2, 3)} | ({own} if own is not None else set())
    if best <= _WHOLE_TABLE:
        around |= set(range(best))
    else:
        around |= {0, 1} | {2**power for power in range(1, 10) if 2**power < best}
    return sorted(each for each in around if 0 <= each < len(plan.outlooks))


def lines(plan: SizingPlan, own: int | None, simulated: Mapping[int, Simulated]) -> list[str]:
    """Return the lines of the plan. `own` is the number of standbys that the user gave, if any."""
    parts = [
        _paragraph(_job(plan.inputs)),
        _table(plan, own, simulated),
        _paragraph(_legend(plan.inputs, simulated)),
        _paragraph(_standbys(plan)),
        *([] if own is None or own == plan.recommended else [_paragraph(_own(plan, own))]),
        _paragraph(_checkpoints(plan)),
        _variations(plan),
        ["docs/sizing.md has the formulas, the assumptions and the sources of the defaults."],
    ]
    return [line for each in parts for line in ("", *each)][1:]


def _paragraph(text: str) -> list[str]:
    kept = text.replace(" %", "\xa0%").replace("< ", "<\xa0")  # no line breaks within a share
    return [line.replace("\xa0", " ") for line in textwrap.wrap(kept, _WIDTH, break_on_hyphens=False)]


def _job(inputs: SizingInputs) -> str:
    replaced = inputs.replacement_s is not None and inputs.replacement_s < inputs.repair_s
    how = "is replaced by another one" if replaced else "is back from repair"
    return (
        f"{count(inputs.nodes, 'node')} of {count(inputs.gpus_per_node, 'GPU')}, each with a fault every"
        f" {seconds(inputs.mtbf_s)}: a fault of the job every {seconds(1.0 / inputs.fault_rate)}."
        f" {percent(inputs.node_loss)} of the faults take the node away. A lost node {how} after"
        f" {seconds(inputs.refill_s)} on average."
    )


def _table(plan: SizingPlan, own: int | None, simulated: Mapping[int, Simulated]) -> list[str]:
    head = ["STANDBYS", "FOUND", "WAIT", "WAITING", "ETTR", *["SIMULATED"] * bool(simulated)]
    head += ["STANDBYS/DAY", "WAITING/DAY", "COST"]
    rows = []
    for each in (plan.outlooks[at] for at in shown(plan, own)):
        cells = [str(each.standbys), _probability(each.ready), seconds(each.mean_wait_s), part(each.waiting)]
        cells += [percent(each.ettr)]
        cells += [_measured(simulated[each.standbys])] if simulated else []
        cells += [f"{each.standbys_per_day:,.0f}", f"{each.waiting_per_day:,.0f}", _cost(each.cost)]
        rows.append((*cells, _mark(each, plan, own)))
    return table((*head, ""), rows, frozenset(range(len(head))))


def _probability(share: float) -> str:
    """Return a probability; "100.00 %" only if nothing was rounded."""
    return "0 %" if share == 0 else percent(share)


def _cost(value: float) -> str:
    return f"{value:,.3f}" if math.isfinite(value) else "-"


def _measured(found: Simulated) -> str:
    return f"{found.ettr * 100:.2f} ± {found.ettr_error * 100:.2f} %"


def _mark(each: Outlook, plan: SizingPlan, own: int | None) -> str:
    marks = ["recommended"] if each.standbys == plan.recommended and each.ettr else []
    marks += ["yours"] if each.standbys == own else []
    return f"<- {', '.join(marks)}" if marks else ""


def _legend(inputs: SizingInputs, simulated: Mapping[int, Simulated]) -> str:
    unit = "GPU hours" if inputs.gpu_hour_cost is None else "the currency of --gpu-hour-cost"
    error = " SIMULATED is the ETTR of a simulation, with its standard error." if simulated else ""
    return (
        "FOUND is the share of lost nodes for which a standby is ready. WAIT is the mean wait for a node if"
        " no standby is ready. WAITING is the share of time during which the whole job waits."
        f"{error} STANDBYS/DAY is the cost of the standbys, WAITING/DAY is the cost of the job's waiting"
        f" GPUs, and COST is the cost of one useful GPU hour, all in {unit}."
    )


def _standbys(plan: SizingPlan) -> str:
    best = plan.outlooks[plan.recommended]
    if best.ettr == 0:
        return (
            "No number of standbys helps: recoveries, lost steps and checkpoints take more time than there is"
            " between faults. Check --mtbf, --step and --checkpoint-bandwidth."
        )
    limit = f" More than {MOST:,} are not considered: check --mtbf and --repair." * (best.standbys == MOST)
    return (
        f'Standbys: {best.standbys} (holdfast.dev/standby: "{best.standbys}"). With this number, a useful'
        " GPU hour is cheapest: one more standby would cost more than the waiting that it prevents."
        f"{limit} With {plan.for_99}, a standby is ready for at least 99 % of lost nodes. ETTR is"
        f" {percent(best.ettr)}; the rest is waiting ({_part(best.waiting)}), detection and recovery"
        f" ({_part(best.recovering)}), lost steps ({_part(best.lost_steps)}), checkpoints"
        f" ({_part(best.checkpoints)}), and losing all copies of the state ({_part(best.outages)})."
    )


def _part(share: float) -> str:
    """Return a share with as many digits as the ETTR beside it."""
    return "< 0.01 %" if 0 < share < 0.00005 else f"{share * 100:.2f} %"


def _own(plan: SizingPlan, own: int) -> str:
    yours, best = plan.outlooks[own], plan.outlooks[plan.recommended]
    if not yours.ettr:
        return f"With {count(own, 'standby')}, the job makes no progress."
    return (
        f"With {count(own, 'standby')}, ETTR is {percent(yours.ettr)}, and a useful GPU hour costs"
        f" {part(yours.cost / best.cost - 1.0)} more."
    )


def _checkpoints(plan: SizingPlan) -> str:
    found = plan.checkpoint
    why = (
        f"storage needs {seconds(found.write_s)} to write one"
        if found.interval_s == found.write_s
        else f"Young's formula gives sqrt(2 x {seconds(found.cost_s)} of training that a checkpoint costs x"
        f" {seconds(found.all_copies_s)})"
    )
    return (
        f"Checkpoint interval: {seconds(found.interval_s)} (holdfast.dev/checkpoint-every:"
        f" {_setting(found.interval_s)}), because {why}. Losing one node requires no checkpoint, because"
        " other nodes have the state in memory. Checkpoints are for losing all copies, which happens every"
        f" {seconds(found.all_copies_s)}. Without copies in memory, the interval would have to be"
        f" {seconds(found.without_copies_s)}."
    )


def _setting(interval_s: float) -> str:
    """Return the interval as the value of an option, rounded to a unit that makes no difference."""
    unit_s = 60 if interval_s >= 600 else 1
    return span(max(1, round(interval_s / unit_s)) * unit_s)


def _variations(plan: SizingPlan) -> list[str]:
    rows = [
        (each.change, str(each.standbys), percent(each.ettr), seconds(each.interval_s))
        for each in plan.variations
    ]
    return table(("WHAT IF", "STANDBYS", "ETTR", "CHECKPOINT INTERVAL"), rows, frozenset({1, 2, 3}))


def as_json(plan: SizingPlan, own: int | None, simulated: Mapping[int, Simulated]) -> dict[str, Any]:
    """Return the whole plan, with the outlooks for all numbers of standbys up to the largest of the table."""
    inputs = plan.inputs
    known = {each.name: getattr(inputs, each.name) for each in dataclasses.fields(SizingInputs)}
    return {
        "schema": SCHEMA,
        "inputs": known,
        "recommended": plan.recommended,
        "standbys": plan.recommended if own is None else own,
        "for_99_percent": plan.for_99,
        "cost_unit": "GPU hours" if inputs.gpu_hour_cost is None else "price",
        "checkpoint": dataclasses.asdict(plan.checkpoint),
        "outlooks": [dataclasses.asdict(each) for each in plan.outlooks],
        "variations": [dataclasses.asdict(each) for each in plan.variations],
        "simulated": [{"standbys": at, **dataclasses.asdict(each)} for at, each in simulated.items()],
    }

"""The operators and their tools in the joined year: remedies that are right, wrong, late or unnoticed."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from bench.quarantine.joined.events import BOOT_S, Events, cause_of
from bench.quarantine.joined.faults import GPU, REMEDIES, NodeFault
from bench.quarantine.joined.guesses import HOUR_S
from bench.quarantine.joined.node import JoinedNode, is_reported
from bench.quarantine.report import REACTION_S
from bench.quarantine.simulated_node import Node
from supervisor.quarantine import transition
from supervisor.quarantine.model import NO_NEW_WORK, Drain, QuarantineAction, Release, Taint

RESET_S = 30.0  # how long a GPU does not respond while it is reset
STOPPED_S, STARTED_S = 60.0, 120.0  # how long before and after a reset the agent is stopped, if at all
AGAIN_S = 1200.0  # when a remedy's effect is judged; the agent clears a finding after 10 min


class Repairs:
    """Carries out what the quarantine requests, as a repair service would, and answers alerts."""

    def __init__(self, events: Events) -> None:
        self.events, self.pool, self.chance = events, events.pool, events.chance
        self.guesses = events.guesses
        self._in_progress: set[str] = set()
        self._answering: set[str] = set()
        self._nodes = {node.name: node for node in events.nodes}
        self.causes: dict[str, int] = {}  # why healthy nodes were drained
        self.undrained: list[str] = []
        self.hidden = 0  # releases of nodes with a fault that a remedy has only hidden
        self.pool.acted = self._acted
        self.pool.alerted = self._alerted
        events.booted = lambda node: self.remedied(node, "reboot_node", range(len(node.machine.gpus)))

    # -- what the quarantine does

    def _acted(self, node: Node, action: QuarantineAction) -> None:
        one = self._nodes[node.name]
        held = one.standing.quarantine
        if isinstance(action, Release):
            self.hidden += any(fault.is_dormant for fault in one.faults)
            one.standing = replace(one.standing, busy=not one.is_down)
        elif held is None:
            return
        elif isinstance(action, Taint) and held.at_s == self.pool.now_s:
            self.pool.after(self._mean(self.guesses.job_s), partial(self._emptied, one, held.at_s))
            if not one.is_bad and self.chance.random() < self.guesses.overruled:
                self.pool.after(self._mean(HOUR_S), partial(self._overrule, one, held.at_s))
            policy = self.pool.policy
            self.pool.after(
                policy.storm_window_s + policy.cooldown_s + policy.confirm_s + REACTION_S,
                partial(self._check_drained, one, held.at_s),
            )
            self.begin(one)
        elif isinstance(action, Drain):
            if not one.is_bad:
                cause = cause_of(one) or f"unknown: {action.why}"
                self.causes[cause] = self.causes.get(cause, 0) + 1
            self.pool.after(self._mean(self.guesses.drain_s), partial(self._emptied, one, held.at_s))

    def _mean(self, mean_s: float) -> float:
        return self.chance.expovariate(1 / mean_s)

    def _emptied(self, node: JoinedNode, stay_s: float) -> None:
        held = node.standing.quarantine
        if held is not None and held.at_s == stay_s and node.standing.busy:
            self.pool.touch(node)
            node.standing = replace(node.standing, busy=False)
            self.begin(node)

    def _check_drained(self, node: JoinedNode, stay_s: float) -> None:
        """Note a node that still runs a job despite a fault with two witnesses.

        The agent has reported the fault ever since the taint.
        """
        held = node.standing.quarantine
        if held is None or held.at_s != stay_s or not node.standing.busy or node.standing.cordoned:
            return
        sure = [each for each in node.faults if each.remedy and each.witnesses > 1 and not each.is_dormant]
        old = [
            each for each in sure if is_reported(node, each) and self.events.truth.knows(node, each, stay_s)
        ]
        if old and held.drain_at_s is None and node.daemon.runs and not node.cut_off:
            self.undrained.append(f"{node.name} at {self.pool.now_s:.0f} s: {old[0].key}")

    def _overrule(self, node: JoinedNode, stay_s: float) -> None:
        held = node.standing.quarantine
        if held is not None and held.at_s == stay_s and not node.is_bad:
            self.pool.tally.count("overruled")
            self._let_back(node)

    def _let_back(self, node: JoinedNode) -> None:
        """Remove the taint of a node, as an operator does."""
        self.pool.touch(node)
        shown = transition.released_by_operator(node.view(self.pool.now_s), self.pool.now_s)
        kept = node.standing
        node.standing = replace(
            kept,
            quarantine=None,
            waiver=shown.waiver,
            released_at_s=shown.released_at_s,
            busy=not node.is_down,
        )
        self.pool.tally.ended(node, self.pool.now_s)

    # -- remedies

    def begin(self, node: JoinedNode) -> None:
        """Begin the remedy that the taint asks for, if the node is empty and still unhealthy."""
        held, name = node.standing.quarantine, node.name
        if held is None or held.effect != NO_NEW_WORK or name in self._in_progress:
            return
        if node.standing.busy or not (node.is_ill or held.replace):
            return
        if held.action not in REMEDIES:
            return  # a person must look at it; either the fault ends without a remedy, or an alert follows
        guesses, chance = self.guesses, self.chance
        remedy = held.action
        if chance.random() < guesses.wrong:
            remedy = REMEDIES[max(1, REMEDIES.index(remedy) - 1)]
        takes_s = {
            "reset_gpu": guesses.reset_s, "reboot_node": guesses.reboot_s, "replace": guesses.replace_s
        }[remedy] * chance.uniform(0.5, 2.0)  # fmt: skip
        if chance.random() < guesses.late:
            takes_s += self._mean(guesses.late_s)
        self._in_progress.add(name)
        self.pool.after(takes_s, partial(self.carry_out, node, remedy))

    def carry_out(self, node: JoinedNode, remedy: str, *, by_operator: bool = False) -> None:
        """Reset or replace the reported GPUs, or boot the node.

        If the agent does not see an operator's reset, the operator clears the GPUs, as the runbook says.
        """
        if node.is_down:
            self._finish(node)
            return
        slots = self._slots(node)  # before the agent stops, because it reports nothing after that
        if remedy == "reset_gpu":
            unseen = self.chance.random() < self.guesses.unseen
            if unseen:
                self.pool.tally.count("unseen_resets")
                self.events.stop(node)
            self.pool.after(STOPPED_S, partial(self._reset, node, slots, unseen, by_operator))
        else:
            self.pool.touch(node)
            self.events.take_down(node)
            self.pool.after(BOOT_S, partial(self._boot, node, remedy, slots))

    def _slots(self, node: JoinedNode) -> list[int]:
        """Return the slots of the GPUs that the node's report and its taint are about."""
        held = node.standing.quarantine
        wanted = {*node.unhealthy()}
        if held is not None:
            wanted |= {word for key in held.evidence for word in key.split(" ")} | {*held.replace}
        return [at for at, gpu in enumerate(node.machine.gpus) if {gpu.entity, gpu.uuid} & wanted]

    def _reset(self, node: JoinedNode, wanted: list[int], unseen: bool, by_operator: bool) -> None:
        if node.is_down:
            self._finish(node)
            return
        slots = [slot for slot in wanted if node.machine.begin_reset(slot)]
        self.events.look(node)
        to_clear = [node.machine.gpus[slot].entity for slot in slots if by_operator]
        boots = node.machine.boots
        self.pool.after(RESET_S, partial(self._end_reset, node, slots, unseen, boots, to_clear))

    def _end_reset(
        self, node: JoinedNode, slots: list[int], unseen: bool, boots: int, to_clear: list[str]
    ) -> None:
        if node.machine.boots == boots and not node.is_down:
            for slot in slots:
                node.machine.end_reset(slot)
                node.false.pop(node.machine.gpus[slot].entity, None)
            self.remedied(node, "reset_gpu", slots)
            self.events.look(node)
            if node.standing.quarantine is None:
                node.standing = replace(node.standing, busy=not node.standing.cordoned)
        if unseen:
            self.pool.after(STARTED_S, partial(self._start_again, node, to_clear))
        self._finish(node)

    def _start_again(self, node: JoinedNode, to_clear: list[str]) -> None:
        """Start the agent after a reset that it could not see, and clear the GPUs that it still reports."""
        self.events.start(node)
        for entity in [each for each in to_clear if each in node.unhealthy()]:
            node.daemon.clear(entity, self.pool.now_s)
        self.events.look(node)

    def _boot(self, node: JoinedNode, remedy: str, slots: list[int]) -> None:
        if remedy == "replace":
            for slot in slots:
                node.machine.exchange(slot)
                self.remedied(node, "replace", [slot])
        self.events.bring_up(node)
        self._finish(node)

    def _finish(self, node: JoinedNode) -> None:
        self.pool.after(AGAIN_S, partial(self._judge, node))

    def _judge(self, node: JoinedNode) -> None:
        self._in_progress.discard(node.name)
        self.begin(node)

    def remedied(self, node: JoinedNode, remedy: str, slots: range | list[int]) -> None:
        """End the faults that the remedy ends, and hide the others, whose symptoms return later."""
        for fault in list(node.faults):
            if fault.kind.on == GPU and fault.slot not in slots:
                continue
            needs = REMEDIES.index(fault.remedy)
            if not needs:
                continue
            if REMEDIES.index(remedy) >= needs:
                self._end(node, fault)
            elif not self._persists(node, fault) and not fault.is_dormant:
                fault.is_dormant = True
                self.pool.tally.count("hidden_by_a_remedy")
                self.pool.after(self._mean(self.guesses.returns_s), partial(self._show_again, node, fault))

    def _show_again(self, node: JoinedNode, fault: NodeFault) -> None:
        """Show the symptoms of a hidden fault again, when the node is running."""
        if fault not in node.faults or not fault.is_dormant:
            return
        if node.is_down:
            self.pool.after(BOOT_S, partial(self._show_again, node, fault))
        else:
            self.events.again(node, fault)

    def _persists(self, node: JoinedNode, fault: NodeFault) -> bool:
        gpu = node.machine.gpus[fault.slot]
        return fault.remedy != "replace" or gpu.sram_exceeded or gpu.remap_failed

    def _end(self, node: JoinedNode, fault: NodeFault) -> None:
        self.events.truth.ended(node, fault)
        is_same = not fault.device or any(gpu.uuid == fault.device for gpu in node.machine.gpus)
        share = self.guesses.recurs_lemon if node.lemon else self.guesses.recurs
        if is_same and self.chance.random() < share:
            self.pool.tally.count("came_again")
            self.pool.after(self._mean(self.guesses.recurs_s), partial(self._come_again, node, fault))

    def _come_again(self, node: JoinedNode, fault: NodeFault) -> None:
        if self.pool.now_s >= self.events.until_s:
            return  # no fault begins after that time, or a lemon might never be repaired permanently
        if node.is_down or (fault.device and all(gpu.uuid != fault.device for gpu in node.machine.gpus)):
            return
        self.events.again(node, fault)

    # -- alerts

    def _alerted(self, node: Node) -> None:
        one = self._nodes[node.name]
        if one.name not in self._answering:
            self._answering.add(one.name)
            self.pool.after(self._mean(self.guesses.answer_s), partial(self._answer, one))

    def _answer(self, node: JoinedNode) -> None:
        """Have an operator do what the node really needs, or declare it healthy if it needs nothing."""
        self._answering.discard(node.name)
        if node.is_down or node.name in self._in_progress or not node.daemon.runs:
            return
        held = node.standing.quarantine
        needs = max((REMEDIES.index(fault.remedy) for fault in node.faults), default=0)
        if needs and (node.is_ill or held is not None):
            self.pool.tally.count("repaired_after_an_alert")
            self._in_progress.add(node.name)
            self.pool.touch(node)
            # The operator ends the job first, because a GPU that is being reset does not respond, which is a
            # second witness.
            node.standing = replace(node.standing, busy=False)
            self.carry_out(node, REMEDIES[needs], by_operator=True)
        elif node.is_ill and not node.faults:
            self.pool.tally.count("cleared_by_operators")
            for entity in node.unhealthy():
                node.daemon.clear(entity, self.pool.now_s)
                self.events.cleared(node, entity)
            self.events.look(node)
        elif held is not None and held.replace and not node.faults:
            self.pool.tally.count("overruled")
            self._let_back(node)

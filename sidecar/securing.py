"""Secure the member's state when ordered to: freeze its ranks, list its states, and follow the tails.

From the states that the members list, the supervisor chooses the one to resume from. Once a state is listed,
no rank may overwrite it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from holdfast.protocol.launcher_messages import LauncherOrder, LauncherState
from holdfast.protocol.member_messages import HeldPrivateState, MemberOrder
from sidecar.clients import LauncherClient
from sidecar.state.holdings import Holdings
from sidecar.watch.member_watch import MemberWatch

log = logging.getLogger(__name__)

TAIL_POLL_S = 0.01  # the time between two checks of whether a tail has ended
ASK_ROUNDS = 50  # during a tail, ask the ranks for their activity once in this many checks


class StateSecurer:
    """Secures the state of one generation after another. `secured_for` is the newest generation so far."""

    def __init__(
        self,
        holdings: Holdings,
        launcher: LauncherClient,
        observed: MemberWatch,
        send: Callable[[LauncherOrder], None],
        changed: Callable[[], None],
    ) -> None:
        """`send` sends an order to the launcher. `changed` is called when there is something to report."""
        self._holdings, self._launcher, self._observed = holdings, launcher, observed
        self._send, self._changed = send, changed
        self._privates: tuple[HeldPrivateState, ...] = ()
        self.secured_for = 0
        self.followed = 0  # the newest generation whose tails were watched until they ended

    def privates(self) -> tuple[HeldPrivateState, ...]:
        """Return the private states that this member held when it last secured its state.

        Once no rank that could change them is left, return the current list instead.
        """
        state = self._launcher.state
        if state is None or not state.ranks or any(rank.state != "exited" for rank in state.ranks):
            return self._privates
        return self._holdings.privates()

    def list_again(self) -> None:
        """List the private states again, after others were copied to this member, which has no ranks."""
        self._privates = self._holdings.privates()

    def pursue(self, order: MemberOrder) -> None:
        """Take the next step towards a secured state of the order's generation. Safe to repeat."""
        if self.secured_for < order.generation:
            self._secure(order)
        elif self._has_begun_since(order):
            self._ask_ranks(order)

    async def follow(self, generation: int, newest: Callable[[], MemberOrder]) -> None:
        """Report when tails begin and end, because the supervisor waits until they have ended.

        Returns once they have ended and the state is secured, or once `newest` returns a different order.
        """
        rounds, before = 0, frozenset[int]()
        while (order := newest()).do == "secure" and order.generation == generation:
            tails = self._observed.ranks_in_tail(generation)
            if tails != before:
                before = tails
                self._changed()
            if not tails and self.secured_for >= generation:
                break
            if tails and rounds % ASK_ROUNDS == 0:
                self._send(LauncherOrder("where", generation))
            rounds += 1
            await asyncio.sleep(TAIL_POLL_S)
        self.followed = generation

    def _secure(self, order: MemberOrder) -> None:
        state = self._launcher.state
        if state is None:  # wait for the launcher's state; if it does not arrive, the supervisor times out
            return
        if not self._observed.silent and _must_freeze(order, state):
            self._ask_ranks(order)
            return
        self._privates = self._holdings.privates()
        self.secured_for = order.generation
        log.info("state secured", extra=_described(order.generation, state, self._holdings))
        self._changed()

    def _has_begun_since(self, order: MemberOrder) -> bool:
        """Return whether the order's ranks started after this member had reported which states it holds.

        The supervisor does not wait for the state of these ranks. They must still be frozen, because
        another step would overwrite a state that this member reported.
        """
        state = self._launcher.state
        return state is not None and not self._observed.silent and _must_freeze(order, state)

    def _ask_ranks(self, order: MemberOrder) -> None:
        self._send(LauncherOrder("secure", order.generation, suspects=order.suspects, copy=order.copy))


def _must_freeze(order: MemberOrder, state: LauncherState) -> bool:
    """Return whether the launcher has ranks of the order's generation that it was not yet asked to freeze."""
    is_asked = state.secure_asked >= order.generation
    return order.just_in_time and state.generation == order.generation and not is_asked


def _described(generation: int, state: LauncherState, holdings: Holdings) -> dict[str, object]:
    """Return the ranks' answers and the existing snapshots, to explain why a step was lost."""
    answers = {each.rank: each.why or "copied" for each in state.secured}
    snapshots = [f"{each.generation}/{each.step}" for each in holdings.slots()]
    return {"generation": generation, "answers": answers, "snapshots": snapshots}

"""Refuse calls of `steps`, `commit` and an optimizer's `step` that are out of order."""

from __future__ import annotations

from enum import Enum

from holdfast.errors import BadInput, Uncommitted

# A script may begin the same step this many times, because skipping a bad batch with `continue` is not a
# mistake.
TRIES = 3


class ScriptPosition(Enum):
    """The script's position relative to the loop over `state.steps()`."""

    OUTSIDE = "outside a loop over state.steps()"
    IN_STEP = "in step"
    COMMITTED = "after the commit of step"


class CallOrder:
    """Tracks the script's position, and refuses calls that are out of order.

    A call that is refused raises `BadInput` (or its subclass `Uncommitted`) and changes nothing.
    """

    def __init__(self) -> None:
        self.place = ScriptPosition.OUTSIDE
        self._step = -1
        self._begun = 0

    def enter(self) -> None:
        """Record that a loop is starting. Raises BadInput if it is inside another loop."""
        if self.place is not ScriptPosition.OUTSIDE:
            raise BadInput(
                f"steps() called {self.place.value} {self._step}: loops over state.steps() cannot be nested. "
                "To train in epochs, loop over steps((epoch + 1) * steps_per_epoch) in each epoch"
            )
        self.place = ScriptPosition.COMMITTED
        self._begun = 0

    def begin(self, step: int) -> None:
        """Record that the loop is about to yield `step`.

        Raises Uncommitted if the step has already begun `TRIES` times without a commit.
        """
        again = step == self._step and self.place is ScriptPosition.IN_STEP
        begun = self._begun + 1 if again else 1
        if begun > TRIES:
            raise Uncommitted(
                f"step {step} began {TRIES} times without a commit: call state.commit(loss=...) at the "
                "end of each step, and do not catch exceptions that torch.distributed raises in it. To skip "
                "batches that produce bad numbers, use --skip-bad-batches"
            )
        self.place, self._step, self._begun = ScriptPosition.IN_STEP, step, begun

    def commit(self) -> None:
        """Check that the script may commit now. Raises BadInput outside a step and after its commit."""
        if self.place is ScriptPosition.OUTSIDE:
            raise BadInput(
                "commit() outside a step: call it once in each step of `for step in state.steps(n):`, "
                "not before or after that loop"
            )
        if self.place is ScriptPosition.COMMITTED:
            raise BadInput(
                f"commit() was already called in step {self._step}: call it once in each step, after the "
                "optimizer's step()"
            )

    def write(self) -> None:
        """Check that an optimizer may change the parameters now. Raises BadInput after the step's commit."""
        if self.place is ScriptPosition.COMMITTED:
            raise BadInput(
                f"optimizer.step() was called after commit() in step {self._step}: call commit() after it"
            )

    def committed(self) -> None:
        """Record that the step is committed."""
        self.place = ScriptPosition.COMMITTED

    def leave(self) -> None:
        """Record that the loop has ended: normally, by `break`, or by an exception."""
        self.place = ScriptPosition.OUTSIDE

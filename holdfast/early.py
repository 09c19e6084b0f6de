"""When a rank's private state of a step is final: after which forward pass it may already be sent.

Nothing says which forward pass of a step is its last, nor whether randomness or the data position changes
after it. So the first steps of a generation are watched; if in all of them the state was final after
the same number of forward passes, the following steps send it then. The first step that is otherwise ends it.
"""

from __future__ import annotations

WATCHED = 4  # steps


class Early:
    """One generation's lesson."""

    def __init__(self) -> None:
        self._after = 0  # forward passes; 0: not known yet
        self._alike = 0  # steps that said so
        self._passes = 0
        self._never = False

    def begin(self) -> None:
        """Start a step, or the same one again."""
        self._passes = 0

    def passed(self) -> bool:
        """Count a forward pass; True when the state is to be looked at or to be sent now."""
        self._passes += 1
        return not self._never and (not self.known or self._passes == self._after)

    @property
    def known(self) -> bool:
        """True when the state may be sent before the optimizer's first write."""
        return self._alike >= WATCHED and not self._never

    def found(self, final: bool) -> None:
        """Learn, before the optimizer's first write, whether the state after the last pass was final."""
        if not self._passes:  # a step that is skipped, or a model whose passes we do not see
            return
        if not final or (self.known and self._passes != self._after):
            self._never = True
        elif self._passes == self._after:
            self._alike += 1
        else:
            self._after, self._alike = self._passes, 1

    def give_up(self) -> None:
        """Never send early again in this generation."""
        self._never = True

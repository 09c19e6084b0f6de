"""Remember what a chaos run must undo, so that it is undone even if the run is interrupted."""

from __future__ import annotations

from collections.abc import Callable


class DueRepairs:
    """The repairs that are due. Each may be carried out more than once."""

    def __init__(self) -> None:
        self._due: dict[str, Callable[[], None]] = {}

    @property
    def due(self) -> tuple[str, ...]:
        return tuple(self._due)

    def owe(self, name: str, undo: Callable[[], None]) -> None:
        """Note a repair before the damage is done, because the run may be interrupted in between."""
        self._due[name] = undo

    def carry_out(self, name: str) -> None:
        """Carry out one repair, if it is due. It remains due if it raises an exception."""
        if name in self._due:
            self._due[name]()
            del self._due[name]

    def carry_out_all(self) -> list[str]:
        """Carry out all repairs, the newest first. Return a line for each that failed."""
        failed = []
        for name in reversed(self.due):
            try:
                self.carry_out(name)
            except Exception as error:  # the other repairs must still be carried out
                failed.append(f"{name}: {error}")
        return failed

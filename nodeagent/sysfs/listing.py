"""A list of what there is, made anew only now and then: to find things costs more than to read them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

LIST_S = 60.0  # a device that is plugged in is seen so late

T = TypeVar("T")


class Listing(Generic[T]):
    """What `find` gave, at most `LIST_S` ago."""

    def __init__(self, find: Callable[[], tuple[T, ...]]) -> None:
        self._find = find
        self._found: tuple[T, ...] = ()
        self._at_s = float("-inf")

    @property
    def last(self) -> tuple[T, ...]:
        return self._found

    def at(self, now_s: float) -> tuple[T, ...]:
        if now_s - self._at_s >= LIST_S:
            self._found, self._at_s = self._find(), now_s
        return self._found

"""A progress page, and a clock for its writer."""

from __future__ import annotations

from pathlib import Path

from holdfast.protocol.progress import Phase, Progress, read
from holdfast.protocol.progress_writer import Page

MS = 1_000_000


class Clock:
    """A clock that advances only when a test sets it."""

    def __init__(self) -> None:
        self.now_ns = 1000 * MS

    def __call__(self) -> int:
        return self.now_ns

    def pass_ms(self, ms: int) -> None:
        self.now_ns += ms * MS


def started(path: Path, clock: Clock, step: int = 41) -> Page:
    page = Page.create(path, clock)
    page.begin(3, 1, 0, 77, step)
    page.phase(Phase.DATA)
    return page


def commit(page: Page, step: int) -> None:
    page.commit(step, 1.0, 2.0, 8, 1024, 1e12, 0)


def seen(path: Path) -> Progress:
    progress = read(path.read_bytes())
    assert progress is not None
    return progress

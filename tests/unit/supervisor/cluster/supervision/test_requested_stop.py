"""Which request to stop is in force."""

from __future__ import annotations

import time

import pytest

from supervisor.cluster.supervision.requested_stop import REMOVAL_S, RequestedStop


class _Resource:
    async def request_stop(self, epoch: int, how: str | None) -> None:
        assert (epoch, how) == (1, None)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [({"stop": "now"}, "now"), ({"stop": "graceful"}, "graceful"), ({"stop": "soon"}, ""), ({}, "")],
)
def test_a_request_is_in_force_until_a_user_removes_it(spec: dict[str, str], expected: str) -> None:
    stop = RequestedStop()
    stop.update(spec)
    assert stop.current == expected
    stop.update({})
    assert stop.current == ""


async def test_a_removed_request_that_the_mirror_shows_late_is_ignored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stop = RequestedStop()
    stop.begin({"stop": "now"})
    await stop.remove(_Resource(), 1)  # type: ignore[arg-type]  # the only method that it needs
    found = [stop.current]
    removed_s = time.monotonic()
    for after_s in (0.0, REMOVAL_S + 1):
        monkeypatch.setattr(time, "monotonic", lambda now_s=removed_s + after_s: now_s)
        stop.update({"stop": "now"})
        found.append(stop.current)
    assert found == ["", "", "now"], "what the mirror shows later is a new request"


async def test_a_new_request_after_the_removal_was_shown_is_in_force() -> None:
    stop = RequestedStop()
    await stop.remove(_Resource(), 1)  # type: ignore[arg-type]
    stop.update({})
    stop.update({"stop": "graceful"})
    assert stop.current == "graceful"

"""Shorten a status of any number of ranks to fit into an API server object. Pure.

A Supervision is read and written as a whole every few seconds, so a large job's status is compressed. If that
is not enough, details of the ranks are dropped first, then the ranks themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from supervisor.store import packed_json

MAX_BYTES = 64 << 10  # the largest text
_DIGITS = 3  # decimal places of times in a shortened status
_RANK = ("rank", "member", "state", "step", "phase", "label", "note", "slow", "slow_since", "peers_s")
_RANK_TIMES = ("step_s", "p99_s", "own_s")
_MEMBER = ("name", "node", "role", "connected", "parked", "launcher_error", "warm_error", "ranks", "leaving")


def encode(status: Mapping[str, Any]) -> str:
    """Return the most complete text of `status` that fits; "" if none does."""
    for form in (_whole, _with_short_ranks, _without_ranks):
        text = packed_json.pack(form(status), MAX_BYTES)
        if len(text) <= MAX_BYTES:
            return text
    return ""


def decode(text: object) -> dict[str, Any] | None:
    """Return the status in `text`, which comes from an untrusted writer; None if there is none."""
    try:
        found = packed_json.unpack(text) if isinstance(text, str) and text else None
    except packed_json.UnreadableText:
        return None
    return found if isinstance(found, dict) else None


def _whole(status: Mapping[str, Any]) -> Mapping[str, Any]:
    return status


def _with_short_ranks(status: Mapping[str, Any]) -> dict[str, Any]:
    return {**_without_ranks(status), "ranks": _each(status.get("ranks"), _short_rank)}


def _without_ranks(status: Mapping[str, Any]) -> dict[str, Any]:
    lag = status.get("lag")
    own = {name: each for name, each in lag.items() if name == "supervisor"} if isinstance(lag, dict) else {}
    return {**status, "members": _each(status.get("members"), _short_member), "ranks": [], "lag": own}


def _short_rank(rank: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: rank[name] for name in _RANK if rank.get(name) not in (None, "")}
    times = {name: rank.get(name) for name in _RANK_TIMES}
    return found | {name: round(time, _DIGITS) for name, time in times.items() if isinstance(time, float)}


def _short_member(member: Mapping[str, Any]) -> dict[str, Any]:
    return {name: member[name] for name in _MEMBER if name in member}


def _each(found: object, form: Callable[[Mapping[str, Any]], dict[str, Any]]) -> list[dict[str, Any]]:
    return [form(each) for each in found if isinstance(each, Mapping)] if isinstance(found, list) else []

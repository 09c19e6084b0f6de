"""Runs with one fault each: a name, the fault, and the restarts that it causes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from supervisor.view.model import Policy
from tests.simulation.cluster.member import Content
from tests.simulation.cluster.world import World

STEPS = 8
TWO = Policy(members=2, standby=1, checkpoint_every_s=0.2)

Script = Callable[..., World]


def cued(rank: int, step: int, what: str, times: int = 1, policy: Policy = TWO, **given: Any) -> World:
    """Return a world where `what` happens to a rank when it begins a step."""
    return World(policy, STEPS, cues={(rank, step): (what, times)}, **given)


def remedies(world: World) -> list[tuple[str, str, int]]:
    """Return cause, remedy and resume point of each start but the first."""
    return [(s.cause.kind if s.cause else "", s.remedy, s.resume.step) for s in world.starts[1:]]


def is_whole(world: World) -> bool:
    return world.ended is not None and world.ended.exit_code == 0 and world.final == Content(STEPS)


SINGLE: dict[str, tuple[Script, list[tuple[str, str, int]]]] = {
    "a rank is killed": (lambda **g: cued(1, 5, "kill", **g), [("crash", "restart", 5)]),
    "a rank is killed before its first step": (
        lambda **g: cued(1, 0, "kill", **g),
        [("crash", "restart", 0)],
    ),
    "a rank is killed before its last step": (
        lambda **g: cued(0, 7, "kill", **g),
        [("crash", "restart", 7)],
    ),
    "a dead rank leaves the others waiting": (
        lambda **g: cued(0, 5, "kill", peers_hang=True, **g),
        [("crash", "restart", 5)],
    ),
    "one of several ranks of a member is killed": (
        lambda **g: cued(3, 5, "kill", policy=replace(TWO, nproc=2), **g),
        [("crash", "restart", 5)],
    ),
    "a rank raises": (lambda **g: cued(1, 5, "raise", **g), [("exception", "restart", 5)]),
    "the only rank raises": (
        lambda **g: cued(0, 6, "raise", policy=Policy(), snapshot_every=0, **g),
        [("exception", "restart", 6)],
    ),
    "a rank never enters a collective": (lambda **g: cued(1, 5, "hang", **g), [("hang", "restart", 5)]),
    "a rank is stopped": (lambda **g: cued(0, 5, "stop", **g), [("hang", "restart", 5)]),
    "a rank is late and goes on by itself": (lambda **g: cued(1, 5, "late", **g), []),
    "a rank evaluates for half a minute": (lambda **g: cued(1, 5, "slow", **g), []),
    "a rank waits for a file that never comes": (
        lambda **g: cued(1, 5, "block", **g),
        [("hang", "restart", 5)],
    ),
    "a member is lost": (lambda **g: cued(1, 5, "lose", **g), [("member_lost", "swap", 5)]),
    "the member of rank 0 is lost": (lambda **g: cued(0, 5, "lose", **g), [("member_lost", "swap", 5)]),
    "a member of three is lost and none stands by": (
        lambda **g: cued(1, 5, "lose", policy=Policy(members=3), **g),
        [("member_lost", "swap", 5)],
    ),
    "a member falls silent": (lambda **g: cued(1, 5, "mute", **g), [("member_lost", "swap", 5)]),
    "a bad number": (lambda **g: cued(1, 5, "nan", snapshot_every=1, **g), [("nan", "rollback", 5)]),
    "a bad number between snapshots": (lambda **g: cued(1, 6, "nan", **g), [("nan", "rollback", 5)]),
    "a sidecar dies": (lambda **g: cued(1, 5, "sidecar", **g), []),
    "a member's messages are lost for a while": (lambda **g: cued(0, 5, "cut", **g), []),
}


def actions(world: World, kind: type[Any]) -> list[Any]:
    return [action for _, action, _ in world.journal if isinstance(action, kind)]

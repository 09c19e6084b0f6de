"""Derive a run's policy, and the settings of its sidecars, from the options of `holdfast run` or of a pod."""

from __future__ import annotations

from typing import Protocol

from holdfast.protocol import defaults, environment
from supervisor.view.model import Policy


class PolicyOptions(Protocol):
    """The options that the command line and the annotations of a pod have in common; times are in seconds."""

    @property
    def standby(self) -> int: ...
    @property
    def min_members(self) -> int: ...
    @property
    def snapshot_every(self) -> int: ...
    @property
    def snapshot_budget(self) -> float: ...
    @property
    def checkpoint_every_s(self) -> float: ...
    @property
    def keep_checkpoints(self) -> int: ...
    @property
    def max_restarts(self) -> int: ...
    @property
    def skip_bad_batches(self) -> bool: ...
    @property
    def loss_jump(self) -> float | None: ...
    @property
    def hang_factor(self) -> float: ...
    @property
    def hang_floor_s(self) -> float: ...
    @property
    def stall_limit_s(self) -> float: ...
    @property
    def first_step_timeout_s(self) -> float: ...
    @property
    def pause_timeout_s(self) -> float: ...
    @property
    def member_timeout_s(self) -> float: ...
    @property
    def grace_s(self) -> float: ...


def policy_of(options: PolicyOptions, members: int, nproc: int, *, from_scratch: bool = False) -> Policy:
    """Return the policy of a run of `members` members with `nproc` ranks each."""
    return Policy(
        members=members,
        standby=options.standby,
        min_members=options.min_members if options.min_members < members else 0,
        nproc=nproc,
        snapshot_every=options.snapshot_every,
        snapshot_budget=options.snapshot_budget,
        checkpoint_every_s=options.checkpoint_every_s,
        hang_floor_s=options.hang_floor_s,
        stall_limit_s=options.stall_limit_s,
        first_step_s=options.first_step_timeout_s,
        keep=options.keep_checkpoints,
        max_restarts=options.max_restarts,
        skip_bad_batches=options.skip_bad_batches,
        loss_jump=defaults.LOSS_JUMP if options.loss_jump is None else options.loss_jump,
        loss_jump_fault=bool(options.loss_jump),
        patience_s=_patience_s(options),
        member_timeout_s=options.member_timeout_s,
        grace_s=options.grace_s,
        from_scratch=from_scratch,
    )


def sidecar_environment(options: PolicyOptions) -> dict[str, str]:
    """Return the variables that configure the sidecars of a run."""
    return {
        environment.HANG_FACTOR: str(options.hang_factor),
        environment.HANG_FLOOR_S: str(options.hang_floor_s or defaults.HANG_FLOOR_S),
        environment.FIRST_STEP_S: str(options.first_step_timeout_s),
        environment.PAUSE_S: str(options.pause_timeout_s),
    }


def _patience_s(options: PolicyOptions) -> float:
    """Return how many seconds a rank waits for its peers. This is longer than it takes to detect a hang."""
    limits = (options.first_step_timeout_s, options.pause_timeout_s, options.hang_floor_s)
    return max(defaults.PATIENCE_S, 2 * max(limits))

"""Defaults of the settings that `holdfast run` passes to its processes, and of processes started without it.

`holdfast launch` and a sidecar can be started without `holdfast run`, and a journal of an older version may
lack a setting that was added later.
"""

from __future__ import annotations

WARM_STRATEGIES = ("auto", "park", "spawn", "cold")  # the values of --warm; the first one is its default
AUTOMATIC = -1  # a value of `SNAPSHOT_EVERY`: as often as the budget allows
SNAPSHOT_EVERY = AUTOMATIC  # steps; 0: only the first snapshot
SNAPSHOT_SLOTS = 2  # not a setting: how many snapshots a member with ranks holds
SNAPSHOT_BUDGET = 0.01  # share of the step time
CHECKPOINT_EVERY_S = 60.0  # 0: no checkpoints
KEEP_CHECKPOINTS = 3
MAX_RESTARTS = 100  # per hour
LOSS_JUMP = (
    10.0  # times the usual spread of the losses; without --loss-jump, such a jump only causes a warning
)
HANG_FACTOR = 3.0  # times the p99 step time
HANG_FLOOR_S = 0.6  # added to that: the host and garbage collection delay short steps as much as long ones
STALL_LIMIT_S = 60.0  # how long a rank may go without a step and without a sign of work
FIRST_STEP_S = 600.0  # for joining, restoring and the first step: compilers, caches, lazy initialisation
PAUSE_S = 1800.0  # for a declared pause without an explicit limit
MEMBER_TIMEOUT_S = 5.0  # silence after which a member counts as lost
GRACE_S = 30.0  # for a script to finish before it is killed
PATIENCE_S = 86_400.0  # a rank's wait for a live peer; `holdfast run` raises it above twice each hang limit

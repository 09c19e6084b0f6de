"""Default settings, used by `holdfast run` and by processes that receive no value.

A process may receive no value, because `holdfast launch` and a sidecar can be started without `holdfast run`,
and because an older version's journal may lack a newer setting.
"""

from __future__ import annotations

MEMBER_DIRECTORY = "/run/holdfast"  # the member's folder in a pod, and the default for a launcher
MEMBER_LOGS = MEMBER_DIRECTORY + "/logs"
WARM_STRATEGIES = ("auto", "park", "spawn", "cold")  # the values of --warm; the first one is its default
AUTOMATIC = -1  # the value of `SNAPSHOT_EVERY` for snapshots as often as the budget allows
SNAPSHOT_EVERY = AUTOMATIC  # in steps; 0 means only the first snapshot
SNAPSHOT_SLOTS = 2  # the number of snapshots that a member with ranks holds; not a setting
SNAPSHOT_BUDGET = 0.01  # a share of the step time
CHECKPOINT_EVERY_S = 60.0  # 0 means no checkpoints
KEEP_CHECKPOINTS = 3
MAX_RESTARTS = 100  # restarts per hour
# a multiple of the losses' usual spread; without --loss-jump, such a jump only causes a warning
LOSS_JUMP = 10.0
HANG_FACTOR = 3.0  # a multiple of the p99 step time
# Added to the multiple, because the host and garbage collection delay short steps as much as long steps.
HANG_FLOOR_S = 0.6
STALL_LIMIT_S = 60.0  # how long a rank may go without a step or any sign of work
# For joining, restoring and the first step, including compilation, cache warm-up and lazy initialisation.
FIRST_STEP_S = 600.0
PAUSE_S = 1800.0  # for a declared pause without an explicit limit
MEMBER_TIMEOUT_S = 5.0  # a member that is silent for this long is considered lost
GRACE_S = 30.0  # how long a script may take to finish before it is killed
# How long a rank waits for a peer that is alive. `holdfast run` raises this to more than twice each hang
# limit.
PATIENCE_S = 86_400.0

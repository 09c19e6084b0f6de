"""A setting has the same default on the command line and in each process that receives it."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

from holdfast.protocol import defaults
from holdfast.protocol.launcher_messages import Launch
from holdfast.state.loss_guard import LossGuard
from sidecar.config import Config
from sidecar.watch.late_ranks import HangPolicy
from supervisor.cli.command_options import RunOptions
from supervisor.cli.run import policy_of_run
from supervisor.options import run_options
from supervisor.view.model import Policy

# The fields of these dataclasses have the same default wherever they occur.
FIELDS = {
    "snapshot_every": defaults.SNAPSHOT_EVERY,
    "snapshot_budget": defaults.SNAPSHOT_BUDGET,
    "checkpoint_every_s": defaults.CHECKPOINT_EVERY_S,
    "keep_checkpoints": defaults.KEEP_CHECKPOINTS,
    "keep": defaults.KEEP_CHECKPOINTS,
    "max_restarts": defaults.MAX_RESTARTS,
    "hang_factor": defaults.HANG_FACTOR,
    "factor": defaults.HANG_FACTOR,
    "floor_s": defaults.HANG_FLOOR_S,
    "stall_limit_s": defaults.STALL_LIMIT_S,
    "first_step_timeout_s": defaults.FIRST_STEP_S,
    "first_step_s": defaults.FIRST_STEP_S,
    "pause_timeout_s": defaults.PAUSE_S,
    "pause_s": defaults.PAUSE_S,
    "member_timeout_s": defaults.MEMBER_TIMEOUT_S,
    "grace_s": defaults.GRACE_S,
    "patience_s": defaults.PATIENCE_S,
}


def defaults_of(kind: Any) -> dict[str, object]:
    return {each.name: each.default for each in fields(kind) if each.name in FIELDS}


def test_a_field_has_the_same_default_in_every_process() -> None:
    used: set[str] = set()
    for kind in (RunOptions, Policy, Config, HangPolicy, Launch):
        found = defaults_of(kind)
        required = {each.name for each in fields(Launch)} & {"snapshot_every", "snapshot_budget"}
        found = {name: value for name, value in found.items() if kind is not Launch or name not in required}
        assert found == {name: FIELDS[name] for name in found}, kind
        used |= found.keys()
    assert used == FIELDS.keys()
    assert Config.__dataclass_fields__["hang_floor_s"].default == defaults.HANG_FLOOR_S
    assert inspect.signature(LossGuard).parameters["factor"].default == defaults.LOSS_JUMP


def test_a_run_without_options_has_the_policy_that_an_old_journal_gets_for_missing_fields() -> None:
    assert policy_of_run(RunOptions(("true",))) == Policy()
    assert Launch.__dataclass_fields__["loss_jump"].default == Policy().loss_jump == defaults.LOSS_JUMP


def test_the_help_states_the_defaults_that_are_not_option_values() -> None:
    options = {option.names[0]: option for option in run_options.RUN}
    assert f"plus {defaults.HANG_FLOOR_S:g}s" in options["--hang-factor"].help
    assert f"the {defaults.HANG_FLOOR_S:g}s of" in options["--hang-floor"].help
    assert options["--loss-jump"].default == f"only a warning, at {defaults.LOSS_JUMP:g}"

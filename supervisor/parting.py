"""What `run` says of the run that was there before it, and before its last line: how to resume. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from supervisor.closing import FINISHED

_BAD_INPUT = 2  # the same command would be refused again


def lines(status: Mapping[str, Any], code: int, given: Sequence[str], run_dir: PurePath) -> list[str]:
    """Return what to say at the end of a run, before the line with its exit code.

    Args:
        status: Its last status.
        code: Its exit code.
        given: The words after `holdfast run`, but for the run directory.
        run_dir: Its directory.
    """
    if code == 0:
        return _nothing_to_do(status, run_dir)
    refused = code == _BAD_INPUT and not _has_trained(status)
    if refused or (status.get("checkpoint") or {}).get("step") is None:
        return []
    return [f"resume with: holdfast run --run-dir {shlex.quote(str(run_dir))} {shlex.join(given)}"]


def ended(why: str, status: Mapping[str, Any]) -> str:
    """Return `why` the run has ended with what a person asks next, where the script itself was done.

    That is how many of its steps it has done, where some are left, and which checkpoint has the last of them.

    Args:
        why: As `closing.last_line` says it.
        status: The last status.
    """
    step = status.get("step")
    if not why.startswith(FINISHED) or type(step) is not int or status.get("own_state"):
        return why
    said = re.split("; |, but ", why, maxsplit=1)[0]
    rest = why.removeprefix(said)
    total, saved = status.get("total_steps"), (status.get("checkpoint") or {}).get("step")
    early = type(total) is int and step < total
    if early:
        said += f", after {step:,} of {total:,} steps"
    if saved == step and step > 0:
        said += f", with a checkpoint of step {step:,}"
    elif early and "no checkpoint" not in rest:
        held = f"the newest checkpoint has step {saved:,}" if type(saved) is int else "without a checkpoint"
        said += f", {held}"
    return said + rest


def stopping(status: Mapping[str, Any], name: str, grace_s: float) -> str:
    """Return what is done now that a signal has asked for the end.

    Args:
        status: The newest status; empty where there is none yet.
        name: Of the signal.
        grace_s: What a script has to end by itself, in seconds.
    """
    if status.get("phase", "forming") == "forming":
        return "stopping"
    if not status.get("own_state"):
        return "saving a checkpoint, then stopping"
    sent = "SIGINT" if name == "SIGINT" else "SIGTERM"
    return f"stopping: the script gets {sent} and has {grace_s:g} s to save what it likes and end"


def again(before: Mapping[str, Any] | None, run_dir: PurePath, stored: bool) -> list[str]:
    """Return what to say before a run starts where there was one: steps that are trained again.

    Those after the newest checkpoint of a run that has ended well, and all of one that left no checkpoint.

    Args:
        before: The last status of the run that was there, None if there was none.
        run_dir: Its directory.
        stored: It has checkpoints, which the run resumes from, or says why not.
    """
    step = before.get("step") if before is not None else None
    if before is None or type(step) is not int:
        return []
    saved = (before.get("checkpoint") or {}).get("step")
    if before.get("exit_code") != 0:
        if stored or step <= 0 or before.get("own_state"):
            return []
        reached = f"the run in {run_dir} had reached step {step:,} and left no checkpoint"
        return [f"{reached}: there is nothing to resume from, and training begins at step 0"]
    begins = saved if type(saved) is int else 0
    if begins >= step:
        return []
    held = f"its newest checkpoint has step {begins:,}" if begins else "it has no checkpoint"
    done = f"the run in {run_dir} has finished already, at step {step:,}"
    return [f"{done}; {held}, and what follows is trained again"]


def _nothing_to_do(status: Mapping[str, Any], run_dir: PurePath) -> list[str]:
    resumed = status.get("resumed") or {}
    if resumed.get("source") != "checkpoint" or resumed.get("step") != status.get("step"):
        return []
    done = f"the state in {run_dir} already has {int(resumed['step']):,} steps"
    return [f"nothing to do: {done}; name another --run-dir to start over"]


def _has_trained(status: Mapping[str, Any]) -> bool:
    """Say whether the run has done steps, so that its input was accepted and the script went wrong later.

    That can be put right, unlike a command, which would be refused again.
    """
    resumed, step = status.get("resumed") or {}, status.get("step")
    began = resumed.get("step", 0)
    return type(step) is int and (resumed.get("source") == "slot" or step > began)

"""Compose the messages of `holdfast run` about an earlier run, the run's end, and how to resume. Pure."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from holdfast import exit_codes
from supervisor import fault_kinds, wording
from supervisor.view.model import Completion

_NUMBER = re.compile(r"\d+(\.\d+)?", re.ASCII)
_UNITS = {"second": "s", "sec": "s", "minute": "m", "min": "m", "hour": "h", "day": "d", "millisecond": "ms"}
_SHORT = frozenset({"ms", "s", "m", "h", "d"})


def time_hint(given: Sequence[str]) -> str:
    """Return a hint if the command begins with the unit of a time: `--checkpoint-every 5 minutes`.

    `given` contains the words after `holdfast run`. Returns "" if no number precedes the unit.
    """
    for number, word in itertools.pairwise(given):
        unit = word.lower() if word.lower() in _SHORT else _UNITS.get(word.lower().removesuffix("s"))
        if unit and _NUMBER.fullmatch(number):
            return f"write a time as one word, {number}{unit}"
    return ""


def after(status: Mapping[str, Any], code: int, given: Sequence[str], run_dir: PurePath) -> list[str]:
    """Return the lines to print at the end of a run, before the line with its exit code.

    Args:
        status: The run's last status.
        code: The run's exit code.
        given: The words after `holdfast run`, without the run directory.
        run_dir: The run's directory.
    """
    if code == 0:
        return _nothing_to_do(status, run_dir)
    refused = code == exit_codes.BAD_INPUT and not _has_trained(status)
    saved = status.get("checkpoint") or {}
    if refused or saved.get("step") is None:
        return []
    name = str(saved.get("path") or "").rpartition("/")[2]
    where = [f"the checkpoint of step {saved['step']:,} is {run_dir / 'checkpoints' / name}"] if name else []
    skip = "--skip-bad-batches " if code == 1 and _would_fail_again(status, given) else ""
    why = ", which skips the batch that produces a bad number," if skip else ""
    command = f"holdfast run --resume --run-dir {shlex.quote(str(run_dir))} {skip}{shlex.join(given)}"
    return [*where, f"resume{why} with: {command}"]


def _would_fail_again(status: Mapping[str, Any], given: Sequence[str]) -> bool:
    """Return True if the run ended because a batch produced a bad number again, and it can skip batches."""
    kind = fault_kinds.kind_of((status.get("last_incident") or {}).get("kind"))
    return kind.is_bad_number and not status.get("own_state") and "--skip-bad-batches" not in given


def closing_line(why: str, completion: Completion | None, status: Mapping[str, Any]) -> str:
    """Return the last line of a run: `why` it ended and, if the script finished, what was trained and saved.

    If the script ended early, the line states the number of steps and the step of the newest checkpoint.

    Args:
        why: The reason, from `closing.summary`.
        completion: The parts of `why`, if the script finished and they are known.
        status: The last status.
    """
    step = status.get("step")
    if completion is None or type(step) is not int or status.get("own_state"):
        return why
    total, saved = status.get("total_steps"), (status.get("checkpoint") or {}).get("step")
    progress = ""
    early = type(total) is int and step < total
    if early:
        progress += f", after {step:,} of {total:,} steps"
    if saved == step and step > 0:
        progress += f", with a checkpoint of step {step:,}"
    elif early and not completion.missing:
        held = (
            f"the newest checkpoint is from step {saved:,}" if type(saved) is int else "without a checkpoint"
        )
        progress += f", {held}"
    return wording.finish(completion.missing, completion.notes, completion.incidents, progress)


def stopping(status: Mapping[str, Any], name: str, grace_s: float) -> str:
    """Return the line that says how the run responds to the first signal that ends it.

    Args:
        status: The newest status; empty if there is none yet.
        name: The name of the signal.
        grace_s: The time in seconds that the script has to exit.
    """
    if status.get("phase", "forming") == "forming":
        return "stopping"
    if not status.get("own_state"):
        return "saving a checkpoint, then stopping"
    sent = "SIGINT" if name == "SIGINT" else "SIGTERM"
    return f"stopping: the script receives {sent} and has {grace_s:g} s to save its state and exit"


def before(
    earlier: Mapping[str, Any] | None, run_dir: PurePath, stored: bool, resumes: bool = False
) -> list[str]:
    """Return a warning if this run will repeat steps of an earlier run in the same directory; otherwise [].

    If the earlier run finished, the steps after its newest checkpoint are repeated. If it left no checkpoint,
    all of its steps are repeated. With `resumes`, also say if there is nothing to resume from.

    Args:
        earlier: The last status of the earlier run; None if there was no run.
        run_dir: The directory of both runs.
        stored: True if there are checkpoints. The run then resumes from one, or reports why it cannot.
        resumes: True if the user requested to resume an earlier run.
    """
    lines = _repeats(earlier, run_dir, stored)
    if lines or stored or not resumes or (earlier or {}).get("own_state"):
        return lines
    return [f"--resume: there is no checkpoint in {run_dir / 'checkpoints'}, so training starts at step 0"]


def _repeats(earlier: Mapping[str, Any] | None, run_dir: PurePath, stored: bool) -> list[str]:
    """Return a warning if steps of the earlier run will be repeated; otherwise []."""
    step = earlier.get("step") if earlier is not None else None
    if earlier is None or type(step) is not int:
        return []
    saved = (earlier.get("checkpoint") or {}).get("step")
    if earlier.get("exit_code") != 0:
        if stored or step <= 0 or earlier.get("own_state"):
            return []
        reached = f"the run in {run_dir} had reached step {step:,} and left no checkpoint"
        return [f"{reached}: there is nothing to resume from, so training starts at step 0"]
    begins = saved if type(saved) is int else 0
    if begins >= step:
        return []
    held = f"its newest checkpoint is from step {begins:,}" if begins else "it has no checkpoint"
    done = f"the run in {run_dir} has already finished, at step {step:,}"
    return [f"{done}; {held}, so the later steps will be trained again"]


def _nothing_to_do(status: Mapping[str, Any], run_dir: PurePath) -> list[str]:
    resumed = status.get("resumed") or {}
    if resumed.get("source") != "checkpoint" or resumed.get("step") != status.get("step"):
        return []
    done = f"the state in {run_dir} is already at step {int(resumed['step']):,}"
    return [f"nothing to do: {done}; choose another --run-dir to start over"]


def _has_trained(status: Mapping[str, Any]) -> bool:
    """Return True if the run has completed steps, which shows that the command accepts its input.

    A command that refused its input would refuse it again, so resuming would make no sense.
    """
    resumed, step = status.get("resumed") or {}, status.get("step")
    began = resumed.get("step", 0)
    return type(step) is int and (resumed.get("source") == "slot" or step > began)

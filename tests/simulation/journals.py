"""The journals of simulated histories, as the supervisor would write them.

The bytes of a journal are a format: later versions read them, and replay decisions from them. The decisions
must also stay the same unless a change is intended. `journals.jsonl.xz` holds the journals that an earlier
version wrote for the same histories, and `test_journals` compares them line by line. After an intended
change, review the differences that the test reports, and then write the file with
`python -m tests.simulation.journals`.
"""

from __future__ import annotations

import json
import lzma
import random
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from supervisor.observability.bookkeeping import Bookkeeping
from supervisor.store.journal import Journal
from supervisor.view.model import Policy, RunAction, StopRequest, View
from tests.simulation.cluster.group import FAULTS
from tests.simulation.cluster.scripts import SINGLE, STEPS, TWO, cued
from tests.simulation.cluster.world import World

RECORDED = Path(__file__).with_name("journals.jsonl.xz")

# Sentences that were reworded after the journals had been recorded (docs/adr/0014-reworded-sentences.md). All
# other bytes must match the record.
REWORDED = (
    (r'"protocol":1,', r'"protocol":2,'),  # an order can name a source of several ranks' states
    (r"it has not been heard of", r"it has stopped reporting"),
    (r"it was restarted at this place already", r"a restart at this place did not help"),
    (
        r"the limit for that is ([\d.]+ s), more than before: a restart at this place did not help",
        r"the limit is now \1, because a restart here did not help",
    ),
    (r"the limit for that is", r"the limit is"),
    (r"nobody waits for it", r"no other rank waits for it"),
    (r"If this is intended: (`with [^`]*`), or", r"If this is intended, use \1 or"),
    (r"(\d+) times the same, at step", r"the same failure \1 times at step"),
    (r"([\d.]+ s) without a step, which ended by themselves", r"no step for \1, and no restart was needed"),
    (r"is lost: another takes its place", r"is lost and is being replaced"),
    (r"ended without a word, as by os", r"ended without a report, as with os"),
    (r"--skip-bad-batches would pass over it", r"--skip-bad-batches would skip it"),
    (
        r"stop asked: a checkpoint of what is secured",
        r"stop requested: saving a checkpoint of the secured state",
    ),
    (r"stopped at once, as asked", r"stopped immediately, as requested"),
    (r"stopped, as asked", r"stopped as requested"),
    (r"from the beginning, as asked", r"from the beginning, as requested"),
    (r"as nothing has been saved yet", r"because nothing has been saved yet"),
    (r"restart the processes where they are", r"restart the processes in place"),
    (r"did not stop in time", r"did not stop before the deadline"),
    (r"a snapshot of it that can be used", r"a usable snapshot of it"),
    (
        r"without a report, as with (os\._exit\(\)), or within its loop",
        r"without a report (for example through \1) or inside its loop",
    ),
    (r"has done its first step", r"has completed its first step"),
    (r"; a bug, not a fault", r"; this is a bug, not a fault"),
    (r"a member does not report", r"waiting for a member to report"),
    (r"stop asked: securing", r"stop requested: securing"),
    (r"gives a bad number again", r"produces a bad number again"),
    (r"the newest( checkpoint)? is of step", r"the newest\1 is from step"),
    (r"roll back to before it, from", r"roll back and resume from"),
    (
        r"from the script's first line: it keeps its own state",
        r"from the script's first line, because it keeps its own state",
    ),
    (r"may have a newer one", r"may have a newer state"),
    (r"is not on storage any more", r"is no longer on storage"),
    (r"no checkpoint any more, although", r"no checkpoint left, although"),
    (
        r"is not repeated: no state from before it is left",
        r"is not repeated, because no earlier state is left",
    ),
    (r", and was restarted: all ranks must leave it", r" and was restarted; all ranks must leave the loop"),
    (r"cannot be created: one ", r"cannot be created: a process "),
    (  # a lock has a limit only if the rank has already hung in this step
        r"has been (in read \(train\.py:7\) \(waiting for a lock\)) since (step \d+)",
        r"hangs again in \2: it has been \1",
    ),
    (
        r"(\(computing\) since step \d+: no step for 4 s while rank \d waits; Holdfast restarts it at 8 s)\.",
        r"\1, or by 40 s if it shows more signs of work.",
    ),
)

# Fields that were added after the journals had been recorded (the same page).
_ADDED = re.compile(rb',"back_ns":\d+')

KINDS = (*(each for each in FAULTS if each != "leave"), "nan")  # a rank that leaves ends the run
SEEDS = range(40)
FAILS_FOREVER = 99


def _stopped(how: StopRequest, at_ms: int, world: World) -> World:
    def ask(asked: World) -> None:
        asked.stop = how
        asked.look()

    return world.at(at_ms, ask)


SCRIPTED: dict[str, Callable[[], World]] = {
    **{name: script for name, (script, _) in SINGLE.items()},
    "nothing fails": lambda: World(TWO, STEPS),
    "a rank raises each time": lambda: cued(1, 5, "raise", times=FAILS_FOREVER),
    "a rank crashes each time": lambda: cued(1, 5, "crash", times=FAILS_FOREVER),
    "a rank hangs each time": lambda: cued(
        1, 5, "hang", times=FAILS_FOREVER, policy=replace(TWO, stall_limit_s=1.0)
    ),
    "a number is bad each time": lambda: cued(1, 5, "nan", times=FAILS_FOREVER),
    "a batch is bad and is skipped": lambda: cued(
        1, 5, "nan", times=FAILS_FOREVER, policy=replace(TWO, skip_bad_batches=True)
    ),
    "a rank leaves": lambda: cued(1, 5, "leave"),
    "a rank of a script that keeps its state is killed": lambda: cued(1, 5, "kill", keeps_itself=True),
    "two members are lost": lambda: World(TWO, STEPS, cues={(1, 2): ("lose", 1), (0, 6): ("lose", 1)}),
    "the only member is lost": lambda: cued(0, 7, "lose", policy=Policy(), snapshot_every=1),
    "members never start": lambda: World(replace(TWO, form_s=3.0), STEPS, boot_ms=60_000),
    "a graceful stop": lambda: _stopped("graceful", 700, World(TWO, STEPS, snapshot_every=0)),
    "an interrupt": lambda: _stopped("interrupt", 700, World(TWO, STEPS)),
    "a stop at once": lambda: _stopped("now", 700, World(TWO, STEPS)),
    "a graceful stop during a hang": lambda: _stopped("graceful", 1450, cued(1, 5, "hang", snapshot_every=0)),
    "a graceful stop before a bad number": lambda: _stopped(
        "graceful", 700, cued(1, 5, "nan", snapshot_every=1)
    ),
    "a report is late": lambda: cued(1, 5, "kill").at(600, lambda w: w.network.delay("m1", 100, 10_000)),
}


def _drawn(seed: int) -> World:
    """Return a random group with faults at random steps, and a supervisor that dies at random points."""
    draw = random.Random(seed)
    policy = Policy(
        members=draw.randint(1, 3),
        nproc=draw.randint(1, 2),
        standby=draw.randint(0, 2),
        checkpoint_every_s=draw.choice([0.0, 0.12]),
        max_restarts=1000,
        stall_limit_s=4.0,
    )
    ranks = policy.members * policy.nproc
    kinds = [kind for kind in KINDS if ranks > 1 or kind != "block"]  # no peer waits for a single rank
    cues = {
        (draw.randrange(ranks), draw.randrange(STEPS)): (draw.choice(kinds), 1)
        for _ in range(draw.randint(1, 4))
    }
    return World(
        policy,
        STEPS,
        snapshot_every=draw.choice([0, 1, 3]),
        peers_hang=draw.random() < 0.5,
        cues=cues,
        kills=frozenset(draw.randint(1, 200) for _ in range(draw.randint(0, 3))),
    )


HISTORIES: dict[str, Callable[[], World]] = {
    **SCRIPTED,
    **{f"drawn with seed {seed}": partial(_drawn, seed) for seed in SEEDS},
}


def journal_of(world: World) -> tuple[bytes, ...]:
    """Run `world` to its end, and return the journal's lines as the supervisor's `Journal` writes them."""
    carry_out = world._carry_out
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal"
        journal = Journal(path)

        def recorded(view: View, action: RunAction, accounts: Bookkeeping) -> None:
            known = len(world.journal)
            try:
                carry_out(view, action, accounts)
            finally:  # the supervisor may be killed after the line was written
                for seen, decided, after in world.journal[known:]:
                    journal.write(seen, world.policy, decided, after, world.ledger)

        world._carry_out = recorded  # type: ignore[method-assign]
        try:
            world.run(300.0)
        finally:
            journal.close()
        return tuple(path.read_bytes().splitlines())


def recorded() -> dict[str, tuple[bytes, ...]]:
    """Return the recorded lines of each history, with the replacements of `REWORDED`."""
    found: dict[str, list[bytes]] = {}
    with lzma.open(RECORDED) as file:
        text = file.read()
        for before, now in REWORDED:
            text = re.sub(before.encode(), now.encode(), text)
        for entry in text.splitlines():
            name, _, line = entry.partition(b"\t")
            found.setdefault(name.decode(), []).append(line)
    return {name: tuple(lines) for name, lines in found.items()}


def without_added_fields(line: bytes) -> bytes:
    """Return a line as it was before the fields of `_ADDED` were added."""
    return _ADDED.sub(b"", line)


def record(path: Path = RECORDED) -> None:
    """Write the journals of all histories to `path`."""
    text = b"".join(
        name.encode() + b"\t" + line + b"\n"
        for name, make in HISTORIES.items()
        for line in journal_of(make())
    )
    path.write_bytes(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME))


def differences(before: Any, now: Any, path: str = "") -> Iterator[str]:
    """Yield one line for each field that differs between two decoded journal lines."""
    if isinstance(before, dict) and isinstance(now, dict):
        if list(before) != list(now):
            yield f"{path or 'line'}: fields {', '.join(before)} -> {', '.join(now)}"
        for name in (each for each in before if each in now):
            yield from differences(before[name], now[name], f"{path}.{name}" if path else name)
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for index, (old, new) in enumerate(zip(before, now, strict=True)):
            yield from differences(old, new, f"{path}[{index}]")
    elif before != now or type(before) is not type(now):
        yield f"{path}: {json.dumps(before)} -> {json.dumps(now)}"


if __name__ == "__main__":
    record()

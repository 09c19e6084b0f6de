"""The modes that benches compare. A mode is a launcher with a script."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from bench.harness.launchers import holdfast_run, torchrun
from bench.workloads.network import BALLAST

RANKS = 2
MANY = "1000000"  # a limit of restarts that is never reached, because the bench ends the launcher
FRESH_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # torchrun creates a new store at each restart


@dataclass(frozen=True, slots=True)
class Mode:
    name: str
    about: str
    argv: tuple[str, ...]
    supervised: bool  # a holdfast run, with incidents, warm processes and an ETTR
    environment: Mapping[str, str] = field(default_factory=dict)


def modes(members: int = 1, state_bytes: int = 0, standby: int = 0) -> tuple[Mode, ...]:
    """Return all modes, beginning with "holdfast".

    Holdfast's ranks are divided among `members`. Scripts that join protect `state_bytes` besides their model.
    """
    state = {BALLAST: str(state_bytes)} if state_bytes else {}
    joins, plain = ("-m", "bench.workloads.protected"), ("-m", "bench.workloads.unmodified")
    ours = (
        *("--members", str(members), "--standby", str(standby)),
        *("--nproc-per-node", str(RANKS // members), "--max-restarts", MANY),
    )
    theirs = (f"--nproc-per-node={RANKS}", f"--max-restarts={MANY}")

    return (
        Mode(
            "holdfast",
            "holdfast run; the script calls holdfast.join, and its state is restored",
            tuple(holdfast_run(ours, joins)),
            True,
            state,
        ),
        Mode(
            "holdfast-unmodified",
            "holdfast run; a plain script that starts over",
            tuple(holdfast_run(ours, plain)),
            True,
        ),
        Mode(
            "torchrun",
            "torchrun with its defaults; the same script, which starts over",
            tuple(torchrun(theirs, joins)),
            False,
            state,
        ),
        Mode(
            "torchrun-fresh",
            "the same with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, which creates a new store at each restart",
            tuple(torchrun(theirs, joins)),
            False,
            {**FRESH_STORE, **state},
        ),
        Mode(
            "torchrun-unmodified",
            "torchrun-fresh with the plain script",
            tuple(torchrun(theirs, plain)),
            False,
            FRESH_STORE,
        ),
    )

"""What a sidecar is told at its start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Config:
    """One frozen record for the life of the process; it is logged once."""

    member: str
    node: str
    nproc: int
    directory: Path  # in the memory volume: launcher.sock, pages, arena
    checkpoints: Path
    supervisor_url: str
    token_file: Path
    poll_s: float = 0.25  # at most; a rank that has stalled is found when its time is over
    report_s: float = 0.5
    hang_factor: float = 3.0
    hang_floor_s: float = 0.6
    first_step_s: float = 600.0
    pause_s: float = 1800.0

    @property
    def arena(self) -> Path:
        return self.directory / "arena"

    @property
    def token(self) -> str:
        return self.token_file.read_text().strip()


def from_environment(environment: Mapping[str, str]) -> Config:
    """Read HOLDFAST_* as the backend set them. Raises `KeyError` for one that is missing."""
    optional = {
        name: float(environment[f"HOLDFAST_{name.upper()}"])
        for name in ("hang_factor", "hang_floor_s", "first_step_s", "pause_s")
        if f"HOLDFAST_{name.upper()}" in environment
    }
    return Config(
        member=environment["HOLDFAST_MEMBER"],
        node=environment["HOLDFAST_NODE"],
        nproc=int(environment["HOLDFAST_NPROC"]),
        directory=Path(environment["HOLDFAST_DIRECTORY"]),
        checkpoints=Path(environment["HOLDFAST_CHECKPOINTS"]),
        supervisor_url=environment["HOLDFAST_SUPERVISOR"],
        token_file=Path(environment["HOLDFAST_TOKEN_FILE"]),
        hang_factor=optional.get("hang_factor", 3.0),
        hang_floor_s=optional.get("hang_floor_s", 0.6),
        first_step_s=optional.get("first_step_s", 600.0),
        pause_s=optional.get("pause_s", 1800.0),
    )

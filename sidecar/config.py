"""A sidecar's configuration, read from HOLDFAST_* variables at startup."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from holdfast.checkpoint import object_location
from holdfast.checkpoint.object_location import ObjectLocation
from holdfast.protocol import defaults, environment
from holdfast.snapshot import member_directory

_OPTIONAL = {  # the variable that sets each of these fields
    "hang_factor": environment.HANG_FACTOR,
    "hang_floor_s": environment.HANG_FLOOR_S,
    "first_step_s": environment.FIRST_STEP_S,
    "pause_s": environment.PAUSE_S,
}
_REPORTED = "reported"  # the value of `environment.STORAGE`


@dataclass(frozen=True, slots=True)
class Config:
    """The sidecar's settings, which do not change while the process lives."""

    member: str
    node: str
    nproc: int
    directory: Path  # in the memory volume; contains launcher.sock, the progress pages and the arena
    checkpoint_directory: Path  # if `objects` is set, it holds only local copies of the objects
    supervisor_url: str
    token_file: Path
    poll_s: float = 0.25  # the time between two polls; less if a rank reaches its limit earlier
    report_s: float = 0.5
    hang_factor: float = defaults.HANG_FACTOR
    hang_floor_s: float = defaults.HANG_FLOOR_S
    first_step_s: float = defaults.FIRST_STEP_S
    pause_s: float = defaults.PAUSE_S
    address: str = ""  # the pod's address; "" if all members are on this machine
    certificates: str = ""  # PEM certificates that prove the identity of an https supervisor
    reports_storage: bool = False  # True if the supervisor cannot read the storage and needs these reports
    objects: ObjectLocation | None = None  # the checkpoints' location, if they are in object storage

    @property
    def is_pod(self) -> bool:
        """True if the launcher runs in another container, where process ids differ from those here."""
        return bool(self.address)

    @property
    def arena(self) -> Path:
        return self.directory / member_directory.ARENA

    @property
    def token(self) -> str:
        return self.token_file.read_text().strip()


def from_environment(given: Mapping[str, str]) -> Config:
    """Read the HOLDFAST_* variables that the backend set.

    Raises `KeyError` if a required variable is missing, or `ValueError` if the checkpoint URL is invalid.
    """
    objects = given.get(environment.OBJECTS)
    optional = {name: float(given[variable]) for name, variable in _OPTIONAL.items() if variable in given}
    return Config(
        member=given[environment.MEMBER],
        node=given[environment.NODE],
        nproc=int(given[environment.NPROC]),
        directory=Path(given[environment.DIRECTORY]),
        checkpoint_directory=Path(given[environment.CHECKPOINTS]),
        supervisor_url=given[environment.SUPERVISOR],
        token_file=Path(given[environment.TOKEN_FILE]),
        address=given.get(environment.ADDRESS, ""),
        certificates=given.get(environment.CA, ""),
        reports_storage=given.get(environment.STORAGE) == _REPORTED,
        objects=object_location.parse(objects) if objects else None,
        **optional,
    )

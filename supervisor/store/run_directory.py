"""The directory of a run: its files, the lock that reserves it for one process, and how to find it."""

from __future__ import annotations

import fcntl
import os
import secrets
import shlex
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from holdfast.errors import BadInput
from holdfast.fileio import durable
from supervisor.store import json_file

FORMAT = 1
RUNS = "holdfast-runs"  # the folder in the working directory for runs without `--run-dir`
LATEST = "latest"
STATUS_BEFORE = "status-before.json"
PROBE_BYTES = 16 << 10  # the size of a probe, which is larger than most statuses
LOCK_S = 0.25  # how long to wait for the lock; a process that only tests the lock holds it for an instant
_PAUSE_S = 0.01
_TOKEN_BYTES = 32


class RunDir:
    """The paths and small files of one run. Creating an instance does not access any file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # Set when opened for a run: the last status of the newest earlier run here that completed a step.
        self.before: dict[str, Any] | None = None
        self._lock = -1  # the lock's descriptor, if this process has opened the directory for a run

    @property
    def journal(self) -> Path:
        return self.path / "journal.jsonl"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def status_file(self) -> Path:
        return self.path / "status.json"

    @property
    def run_file(self) -> Path:
        return self.path / "run.json"

    @property
    def token_file(self) -> Path:
        return self.path / "token"

    def token(self) -> str:
        """Return the secret that authenticates requests to the run. Raises `OSError`."""
        return self.token_file.read_text().strip()

    def write_status(self, status: Mapping[str, Any]) -> None:
        """Replace status.json atomically, but not durably, because it is written often.

        Raises `OSError`. The old file is then unchanged.
        """
        json_file.replace(self.status_file, status, sync=False)

    def probe(self) -> None:
        """Write and remove a file as large as a status. Raises `OSError` if there is no room for it."""
        path = self.path / "probe"
        with durable.replacement(path) as temporary:
            temporary.write_bytes(bytes(PROBE_BYTES))

    def write_run(self, run: Mapping[str, Any]) -> None:
        """Replace run.json atomically and durably. Raises `OSError`."""
        json_file.replace(self.run_file, run, sync=True)

    def write_incident(self, incident: Mapping[str, Any]) -> None:
        """Replace the file of one incident atomically, and durably if the incident is closed.

        Raises `OSError`. The journal also contains an open incident, so a durable write is not needed until
        it is closed. The two fsyncs would delay the orders that follow from the decision.
        """
        path = self.path / "incidents" / f"{incident['id']}.json"
        json_file.replace(path, incident, sync=not incident.get("open"))

    def status(self) -> dict[str, Any] | None:
        """Return the last status; None if there is none or it cannot be read."""
        return json_file.read(self.status_file)

    def has_status(self) -> bool:
        """True if there is a status file, readable or not."""
        return self.status_file.exists()

    def has_checkpoints(self) -> bool:
        """True if the folder contains a checkpoint, even a damaged one, or if it cannot be read."""
        try:
            return any(each.name.startswith("step-") for each in self.checkpoints.iterdir())
        except OSError:
            return True

    def run(self) -> dict[str, Any] | None:
        """Return how the run was started (run.json); None if the file cannot be read."""
        return json_file.read(self.run_file)

    def incidents(self) -> list[dict[str, Any]]:
        """Return the incidents in ascending order. Files without an incident are ignored."""
        files = self._incident_files()
        found = [incident for path in files if (incident := json_file.read(path)) and incident.get("id")]
        return sorted(found, key=lambda incident: (len(str(incident["id"])), str(incident["id"])))

    def incident(self, number: int) -> dict[str, Any] | None:
        """Return one incident; None if it does not exist or cannot be read."""
        return json_file.read(self.path / "incidents" / f"i-{number:04d}.json")

    def newest_incident(self) -> int:
        """Return the number of the newest incident; 0 if there is none."""
        return max((_number(path) for path in self._incident_files()), default=0)

    def unreadable_incidents(self) -> list[str]:
        """Return the names of the incident files that cannot be read."""
        return [path.name for path in self._incident_files() if not (json_file.read(path) or {}).get("id")]

    def _incident_files(self) -> list[Path]:
        try:
            return sorted((self.path / "incidents").glob("i-*.json"))
        except OSError:
            return []

    def check_in_use(self) -> bool:
        """True while a process holds the lock of the directory."""
        return is_held(self.path / "lock")

    def is_gone(self) -> bool:
        """True if the directory was removed, even if new files have been written at its path since.

        Checkpoints and the status create missing directories. The lock file, however, is never recreated.
        """
        try:
            there = (self.path / "lock" if self._lock >= 0 else self.path).stat()
            held = os.fstat(self._lock) if self._lock >= 0 else there
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:
            return False  # unreadable at the moment
        return (there.st_dev, there.st_ino) != (held.st_dev, held.st_ino)

    def name_latest(self, directory: Path) -> None:
        """Make `holdfast-runs/latest` in `directory` point to this run. Call this after the run has begun."""
        with suppress(OSError):  # the link is only a convenience, so a read-only directory is not an error
            _point(directory / RUNS, self.path)

    def close(self) -> None:
        """Release the lock of the directory. The kernel releases it if the process dies."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def open_for_run(
    path: Path | None, now: float, directory: Path | None = None, *, must_exist: bool = False
) -> RunDir:
    """Return the directory of a new or resumed run. This process holds its lock until it ends.

    Args:
        path: The directory; None creates one in `holdfast-runs`.
        now: Unix time in seconds, for the name of a new directory.
        directory: The parent of `holdfast-runs`; the working directory by default.
        must_exist: Whether the directory must already contain a run, which is then resumed.

    Raises:
        BadInput: The directory cannot be used; the message says why. Its contents are unchanged.
    """
    here = Path.cwd() if directory is None else directory
    chosen = _new_name(here / RUNS, now) if path is None else here / path
    with _as_bad_input(chosen):
        if chosen.is_symlink() and chosen.is_dir():  # `latest` will soon point to another run
            chosen = chosen.resolve()
        if must_exist and not (path is not None and _is_run(chosen)):
            raise BadInput(f"--resume: {str(path or chosen)!r} contains no run to resume; check --run-dir")
        created = _make(chosen)
        run = RunDir(chosen)
        try:
            _claim(run)
        except BaseException:
            run.close()
            for each in created:  # rmdir removes only those that are still empty
                with suppress(OSError):
                    each.rmdir()
            raise
    return run


def find(path: Path | None, directory: Path) -> RunDir:
    """Return the run at `path` for reading. If `path` is None, return the newest run of `directory`.

    Raises:
        BadInput: There is no run, or its format is newer than this version can read.
    """
    if path is None:
        return RunDir(newest(directory))
    chosen = directory / path
    if not chosen.is_dir():
        wrong = "is not a directory" if chosen.exists() else "does not exist"
        raise BadInput(f"run directory {str(path)!r} {wrong}: name the directory of a run")
    with _as_bad_input(chosen):
        if not _is_run(chosen):
            raise BadInput(f"directory {str(path)!r} contains no run: name the directory of a run")
    return RunDir(chosen)


def find_living(path: Path | None, directory: Path, command: str) -> RunDir:
    """Return the run for `command`, as `find` does, but require `path` if several runs are active.

    Raises:
        BadInput: As for `find`; also if several runs are active and `path` is None.
    """
    if path is None and not _is_readable_run(directory):
        active = [run.path for run in map(RunDir, _runs(directory / RUNS)) if run.check_in_use()]
        if len(active) > 1:
            given = "".join(f"\n  holdfast {command} --run-dir {shlex.quote(str(each))}" for each in active)
            raise BadInput(f"{command}: {len(active)} runs are active here; name one of them:{given}")
    return find(path, directory)


def _runs(runs: Path) -> list[Path]:
    """Return the directories of the runs in `runs`, and of the latest run even if it is elsewhere."""
    try:
        found = {each.resolve() for each in runs.iterdir() if _is_readable_run(each)}
    except OSError:
        return []
    return sorted(found)


def newest(directory: Path) -> Path:
    """Return the directory of the newest run of `directory`, which may be a run directory itself.

    Raises:
        BadInput: There is no run.
    """
    if _is_readable_run(directory):
        return directory
    runs = directory / RUNS
    if _is_readable_run(runs / LATEST):
        return (runs / LATEST).resolve()
    try:
        found = [each for each in runs.iterdir() if each.name != LATEST and _is_readable_run(each)]
    except OSError:
        found = []
    if not found:
        raise BadInput(f"no run in {runs.absolute()}: name one with --run-dir DIR")
    return max(found, key=lambda each: (_modified(each), each.name))


def _number(path: Path) -> int:
    digits = path.stem.removeprefix("i-")
    return int(digits) if digits.isdecimal() else 0


def _new_name(runs: Path, now: float) -> Path:
    stamp = datetime.fromtimestamp(now, timezone.utc).strftime("%Y%m%d-%H%M%S")
    while True:
        path = runs / f"{stamp}-{secrets.token_hex(2)}"
        if not path.exists():
            return path


def _make(path: Path) -> list[Path]:
    """Create the directory and its parents. Return the new directories, innermost first."""
    if path.is_dir():
        return []
    if path.exists() or path.is_symlink():
        raise BadInput(f"run directory {str(path)!r} is a file: name a directory; it does not have to exist")
    missing = [path, *(each for each in path.parents if not each.exists())]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)
    return missing


def _claim(run: RunDir) -> None:
    """Reserve the directory for this run. Raises `BadInput` or `OSError` if it cannot be used."""
    path = run.path
    is_new = not _is_run(path)
    if is_new and any(not _is_debris(each) for each in path.iterdir()):
        raise BadInput(
            f"run directory {str(path)!r} contains other files:"
            " name a new or empty directory, or the directory of a run"
        )
    if is_new:
        json_file.replace(path / "format", {"holdfast_run": FORMAT}, sync=True)
    run._lock = lock(path / "lock")
    if run._lock < 0:
        raise BadInput(
            f"run directory {str(path)!r} is in use by {_user(run)}: stop that run, or name another directory"
        )
    durable.remove_debris(path)
    run.before = _set_aside(path)
    json_file.replace_secret(run.token_file, secrets.token_hex(_TOKEN_BYTES))
    for folder in ("incidents", "logs"):
        (path / folder).mkdir(mode=0o700, exist_ok=True)
    (path / "checkpoints").mkdir(exist_ok=True)


def _set_aside(path: Path) -> dict[str, Any] | None:
    """Set the earlier run's status aside, and return it.

    The status of a run that completed a step is kept under another name until a later run completes one. If a
    run is killed before its first step, the next run therefore still receives the older status.
    """
    last, kept = path / "status.json", path / STATUS_BEFORE
    found = json_file.read(last)
    if found is not None and (type(found.get("step")) is not int or found["step"] <= 0):
        last.unlink()
        return json_file.read(kept) or found
    if found is not None:
        os.replace(last, kept)
        return found
    last.unlink(missing_ok=True)  # the status cannot be read
    return json_file.read(kept)


def _user(run: RunDir) -> str:
    holder = lock_holder(run.path / "lock") or (run.run() or {}).get("pid")
    return f"process {holder}" if holder else "another process"


def _is_run(path: Path) -> bool:
    """True if `path` is the directory of a run. Raises `BadInput` if its format is newer."""
    found = json_file.read(path / "format", unreadable_is_none=False)
    version = (found or {}).get("holdfast_run")
    if type(version) is not int or version < 1:
        return False
    if version > FORMAT:
        raise BadInput(
            f"run directory {str(path)!r} has format {version}, but this holdfast reads only up to {FORMAT}:"
            " update holdfast, or name another directory"
        )
    return True


def _is_readable_run(path: Path) -> bool:
    try:
        return _is_run(path)
    except BadInput:
        return False


def _is_debris(path: Path) -> bool:
    """True for a file left by a run that was killed while it created its directory."""
    return path.name.startswith(".tmp-") and path.name.endswith("-format")


def _modified(path: Path) -> float:
    for name in ("run.json", "format"):
        with suppress(OSError):
            return (path / name).stat().st_mtime
    return 0.0


@contextmanager
def _as_bad_input(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BadInput(
            f"run directory {str(path)!r} cannot be used: {error.strerror or error}; choose another directory"
        ) from None


def _point(runs: Path, target: Path) -> None:
    """Make `latest` point to `target`, atomically."""
    runs.mkdir(exist_ok=True)
    link = durable.temporary_path(runs, LATEST)
    inside = target.parent == runs
    link.symlink_to(target.name if inside else target.resolve(), target_is_directory=True)
    try:
        os.replace(link, runs / LATEST)
    except OSError:
        link.unlink()
        raise


# -- the lock of a run directory, which the kernel releases if its holder dies


def lock(path: Path) -> int:
    """Return a descriptor that holds the lock until it is closed; -1 if another process holds the lock.

    On success the file contains this process's PID. Raises `OSError`.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        # Earlier versions made the file readable by others, and any user who can read it can lock it.
        if os.fstat(descriptor).st_mode & 0o077:
            os.fchmod(descriptor, 0o600)
        if not _try_for(descriptor, LOCK_S):
            os.close(descriptor)
            return -1
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def is_held(path: Path) -> bool:
    """True while some process holds the lock."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def lock_holder(path: Path) -> int | None:
    """Return the PID of the last process that took the lock; None if it cannot be read."""
    try:
        with open(path, "rb") as file:
            word = file.read(32).strip()
    except OSError:
        return None
    return int(word) if word.isdigit() else None


def _try_for(descriptor: int, patience_s: float) -> bool:
    deadline = time.monotonic() + patience_s
    while not _try(descriptor):
        if time.monotonic() >= deadline:
            return False
        time.sleep(_PAUSE_S)
    return True


def _try(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True

from __future__ import annotations

import json
import os
import resource
import secrets
import signal
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast.errors import BadInput
from holdfast.process import logs
from supervisor.store import run_directory
from supervisor.store.run_directory import RunDir, find, find_living, newest, open_for_run

NOW = 1_700_000_000.0  # 2023-11-14 22:13:20 UTC


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_directory, "LOCK_S", 0.0)


def tree(root: Path) -> dict[str, bytes | str]:
    """Return everything below `root`, to detect changes."""
    return {
        str(path.relative_to(root)): str(path.readlink())
        if path.is_symlink()
        else path.read_bytes()
        if path.is_file()
        else "directory"
        for path in sorted(root.rglob("*"))
    }


def started(path: Path | None, now: float, directory: Path) -> RunDir:
    """Open a run directory as a run does after a successful setup."""
    run = open_for_run(path, now, directory)
    run.name_latest(directory)
    return run


def refused(path: Path | None, directory: Path) -> str:
    before = tree(directory)
    with pytest.raises(BadInput) as error:
        open_for_run(path, NOW, directory)
    assert tree(directory) == before, "something was changed"
    said = str(error.value)
    assert "\n" not in said
    assert "name " in said or "another directory" in said, "the message does not say what to do"
    return said


@contextmanager
def no_room() -> Iterator[None]:
    """Make every write to a file fail, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@contextmanager
def somebody_else() -> Iterator[None]:
    """Act as a user without write access to other users' files. Users other than root have none anyway."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_run_gets_a_new_directory_by_default(tmp_path: Path) -> None:
    run = open_for_run(None, NOW, tmp_path)
    assert run.path.parent == tmp_path / "holdfast-runs"
    assert run.path.name.startswith("20231114-221320-")
    assert json.loads((run.path / "format").read_text()) == {"holdfast_run": 1}
    assert run.checkpoints.is_dir()
    assert run.logs.is_dir()
    other = open_for_run(None, NOW, tmp_path)
    assert other.path != run.path
    run.close()
    other.close()


def test_a_new_directory_never_has_the_name_of_an_existing_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = iter(["2922", "2922", "0001"])
    monkeypatch.setattr(secrets, "token_hex", lambda length: next(drawn) if length == 2 else "00" * length)
    first = open_for_run(None, NOW, tmp_path)
    second = open_for_run(None, NOW, tmp_path)
    assert first.path.name == "20231114-221320-2922"
    assert second.path.name == "20231114-221320-0001"
    first.close()
    second.close()


def test_the_token_is_secret_and_new_for_every_run(tmp_path: Path) -> None:
    run = open_for_run(Path("d"), NOW, tmp_path)
    first = run.token()
    assert len(bytes.fromhex(first)) == 32
    assert stat.S_IMODE(run.token_file.stat().st_mode) == 0o600
    run.close()
    again = open_for_run(Path("d"), NOW, tmp_path)
    assert again.token() != first
    again.close()


def test_an_existing_run_is_resumed_and_keeps_its_files(tmp_path: Path) -> None:
    run = open_for_run(Path("a/b/c"), NOW, tmp_path)
    run.write_incident({"id": "i-0001"})
    (run.checkpoints / "step-00000001").mkdir()
    run.write_status({"phase": "ended"})
    run.close()
    again = open_for_run(tmp_path / "a" / "b" / "c", NOW, tmp_path)
    assert again.incidents() == [{"id": "i-0001"}]
    assert (again.checkpoints / "step-00000001").is_dir()
    assert again.status() is None, "the earlier run's status would pass for this one's"
    again.close()


def test_a_run_knows_how_the_previous_one_ended(tmp_path: Path) -> None:
    first = open_for_run(tmp_path / "a", NOW)
    assert first.before is None
    first.write_status({"exit_code": 0, "step": 12})
    first.close()
    again = open_for_run(tmp_path / "a", NOW)
    assert again.before == {"exit_code": 0, "step": 12}
    assert again.status() is None
    again.close()


def test_the_last_run_with_steps_is_remembered_even_if_later_ones_were_killed_before_theirs(
    tmp_path: Path,
) -> None:
    first = open_for_run(tmp_path / "a", NOW)
    first.write_status({"step": 12})
    first.close()
    for told in ({"step": None}, None, {"step": 0}):
        again = open_for_run(tmp_path / "a", NOW)
        assert again.before == {"step": 12}
        if told:
            again.write_status(told)
        again.close()
    again.write_status({"step": 3})
    assert open_for_run(tmp_path / "a", NOW).before == {"step": 3}


def test_a_run_directory_says_whether_it_has_checkpoints(tmp_path: Path) -> None:
    run = open_for_run(tmp_path / "a", NOW)
    (run.checkpoints / ".tmp-1").mkdir()
    assert not run.has_checkpoints()
    (run.checkpoints / "step-00000012").mkdir()
    assert run.has_checkpoints()
    run.close()


def test_an_empty_directory_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    run = open_for_run(Path("d"), NOW, tmp_path)
    assert run.path == tmp_path / "d"
    run.close()


def test_a_foreign_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "thesis.tex").write_text("everything I have")
    assert f"{str(tmp_path / 'd')!r} contains other files" in refused(Path("d"), tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"holdfast_run": true}', '{"run": 1}', "\0"])
def test_a_directory_with_an_unknown_format_is_foreign(tmp_path: Path, content: str) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "format").write_text(content)
    assert "other files" in refused(Path("d"), tmp_path)


def test_a_newer_format_is_refused_with_its_number(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "format").write_text('{"holdfast_run": 2}')
    said = refused(Path("d"), tmp_path)
    assert "has format 2" in said
    assert "this holdfast reads only up to 1" in said
    with pytest.raises(BadInput, match="format 2"):
        find(Path("d"), tmp_path)


def test_a_file_that_is_named_as_the_run_directory_is_said_to_be_none(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BadInput, match="'file' is not a directory: name the directory of a run"):
        find(Path("file"), tmp_path)
    with pytest.raises(BadInput, match="'none' does not exist: name the directory of a run"):
        find(Path("none"), tmp_path)


@pytest.mark.parametrize("name", ["file", "file/d", "dangling"])
def test_a_file_in_place_of_a_directory_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "dangling").symlink_to("nowhere")
    assert str(tmp_path / name) in refused(Path(name), tmp_path)


def test_a_directory_that_cannot_be_written_is_refused_and_left_unchanged(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    with no_room():
        assert "File too large" in refused(Path("d"), tmp_path)
        assert "File too large" in refused(Path("new/er"), tmp_path)
    (tmp_path / "d").chmod(0o555)
    with somebody_else(), pytest.raises(BadInput, match="cannot be used: Permission denied"):
        open_for_run(Path("d"), NOW, tmp_path)
    with somebody_else(), pytest.raises(BadInput, match="cannot be used: Permission denied"):
        open_for_run(Path("d/e"), NOW, tmp_path)


def test_a_directory_in_use_is_refused_with_the_process_that_uses_it(tmp_path: Path) -> None:
    run = open_for_run(Path("d"), NOW, tmp_path)
    assert run.check_in_use()
    assert f"in use by process {os.getpid()}" in refused(Path("d"), tmp_path)
    run.close()
    assert not run.check_in_use()


def test_the_holder_of_an_old_lock_is_named_from_run_json(tmp_path: Path) -> None:
    run = open_for_run(Path("d"), NOW, tmp_path)
    run.write_run({"pid": 4711})
    (run.path / "lock").write_bytes(b"")
    assert "in use by process 4711" in refused(Path("d"), tmp_path)
    run.close()


def test_a_directory_is_free_once_its_process_is_dead_even_if_children_live(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_directory, "LOCK_S", 10.0)  # the child may still be in its exec call
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        run = open_for_run(Path("d"), NOW, tmp_path)
        lives_on = os.posix_spawn("/bin/sleep", ["sleep", "60"], {})
        os.write(theirs, f"{lives_on} {run.token()}\n".encode())
        os.kill(os.getpid(), signal.SIGKILL)
    os.close(theirs)
    os.waitpid(child, 0)
    with open(ours) as said:
        pid, _ = said.readline().split()
    try:
        run = open_for_run(Path("d"), NOW, tmp_path)
        assert run.path == tmp_path / "d"
        run.close()
    finally:
        os.kill(int(pid), signal.SIGKILL)


def test_the_newest_run_is_the_one_started_last_wherever_it_is(tmp_path: Path) -> None:
    here = tmp_path / "work"
    here.mkdir()
    first = started(None, NOW, here)
    assert newest(here) == first.path
    second = started(None, NOW - 60, here)
    assert newest(here) == second.path
    elsewhere = started(tmp_path / "elsewhere", NOW, here)
    assert newest(here) == elsewhere.path
    assert newest(elsewhere.path) == elsewhere.path, "the run in the working directory must be found"
    for run in (first, second, elsewhere):
        run.close()


def test_of_several_live_runs_the_one_to_act_on_is_named(tmp_path: Path) -> None:
    first, second = started(None, NOW, tmp_path), started(None, NOW + 1, tmp_path)
    with pytest.raises(BadInput) as refused:
        find_living(None, tmp_path, "stop --now")
    said = str(refused.value).splitlines()
    assert said[1:] == [f"  holdfast stop --now --run-dir {run.path.resolve()}" for run in (first, second)]
    assert find_living(first.path, tmp_path, "stop").path == first.path
    assert find_living(None, first.path, "stop").path == first.path, (
        "the run in the working directory must be found"
    )
    first.close()
    assert find_living(None, tmp_path, "stop").path == second.path
    second.close()


def test_a_run_whose_setup_failed_is_not_the_newest(tmp_path: Path) -> None:
    before = started(None, NOW, tmp_path)
    open_for_run(None, NOW + 1, tmp_path).close()
    assert newest(tmp_path) == before.path
    before.close()


def test_an_explicit_run_to_resume_excludes_every_other_directory(tmp_path: Path) -> None:
    open_for_run(Path("a-run"), NOW, tmp_path).close()
    (tmp_path / "empty").mkdir()
    for wrong in (Path("a-rum"), Path("empty"), None):
        before = tree(tmp_path)
        with pytest.raises(BadInput, match=r"--resume: .* contains no run to resume; check --run-dir"):
            open_for_run(wrong, NOW, tmp_path, must_exist=True)
        assert tree(tmp_path) == before
    open_for_run(Path("a-run"), NOW, tmp_path, must_exist=True).close()


def test_without_the_link_the_newest_run_is_found_by_its_time(tmp_path: Path) -> None:
    runs = [started(None, NOW + second, tmp_path) for second in range(3)]
    for run, second in zip(runs, (5, 9, 7), strict=True):
        run.write_run({})
        os.utime(run.path / "run.json", (second, second))
        run.close()
    link = tmp_path / "holdfast-runs" / "latest"
    link.unlink()
    assert newest(tmp_path) == runs[1].path
    link.symlink_to("gone")
    (tmp_path / "holdfast-runs" / "notes").mkdir()
    assert newest(tmp_path) == runs[1].path


def test_without_any_run_the_message_asks_for_one(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"no run in /.*/holdfast-runs: name one with --run-dir DIR"):
        newest(tmp_path)
    with pytest.raises(BadInput, match="'x' does not exist"):
        find(Path("x"), tmp_path)
    with pytest.raises(BadInput, match=r"'\.' contains no run"):
        find(Path(), tmp_path)


def test_readers_skip_missing_torn_or_foreign_files(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert (run.status(), run.run(), run.incidents()) == (None, None, [])
    (tmp_path / "incidents").mkdir()
    for number in (2, 10, 1):
        run.write_incident({"id": f"i-{number:04d}"})
    (tmp_path / "incidents" / "i-0003.json").write_text('{"id": "i-00')
    (tmp_path / "incidents" / "i-0004.json").write_text("[]")
    (tmp_path / "incidents" / "i-0005.json").mkdir()
    (tmp_path / "status.json").write_bytes(b"\xff")
    assert [each["id"] for each in run.incidents()] == ["i-0001", "i-0002", "i-0010"]
    assert run.status() is None


def test_small_files_are_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.write_status({"step": 1})
    run.write_run({"pid": 1})
    with no_room():
        for write in (run.write_status, run.write_run):
            with pytest.raises(OSError, match="File too large"):
                write({"step": 2, "pid": 2})
    assert (run.status(), run.run()) == ({"step": 1}, {"pid": 1})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.json", "status.json"]


def test_a_run_continues_if_only_its_link_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / run_directory.RUNS).write_text("a file")
    started(Path("d"), NOW, tmp_path).close()
    assert "holdfast-runs" in refused(None, tmp_path)


def test_resuming_latest_resumes_the_run_that_it_names(tmp_path: Path) -> None:
    first = started(None, NOW, tmp_path)
    first.close()
    again = open_for_run(Path("holdfast-runs/latest"), NOW, tmp_path)
    assert again.path == first.path, "the next run moves the link, and must not move this one"
    assert newest(tmp_path) == first.path
    again.close()


def test_files_that_may_hold_secrets_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    usual = os.umask(0o022)
    try:
        run = open_for_run(tmp_path / "run", 0.0, tmp_path)
        run.write_run({"command": ["train.py", "--key", "s3cret"]})
        run.write_status({"traceback": "..."})
        run.write_incident({"id": "i-0001"})
        run.write_incident({"id": "i-0002", "open": True})
        logs.opened(run.logs / "gen-0001" / "rank-0.log").close()
    finally:
        os.umask(usual)
    for path in (run.path, *run.path.rglob("*")):
        if path.name != "checkpoints":  # the owner decides who may read the weights
            assert path.stat().st_mode & 0o077 == 0, path
    run.close()


def test_the_lock_of_an_earlier_version_becomes_readable_by_its_owner_only(tmp_path: Path) -> None:
    open_for_run(tmp_path / "run", 0.0, tmp_path).close()
    (tmp_path / "run" / "lock").chmod(0o644)
    again = open_for_run(tmp_path / "run", 0.0, tmp_path)
    assert (again.path / "lock").stat().st_mode & 0o777 == 0o600
    again.close()

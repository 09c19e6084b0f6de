from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, ClassVar

import pytest

from holdfast.errors import BadInput
from nodeagent.agent import claim, saved_state
from nodeagent.agent.policy_file import PolicyFile
from nodeagent.agent.saved_state import SavedState
from nodeagent.cli import assembly, commands, options
from nodeagent.model import Level
from nodeagent.policy.loading import shipped
from nodeagent.sensing import clock as clocks
from nodeagent.sensing import operator_requests
from nodeagent.sensing.operator_requests import OperatorRequests
from nodeagent.sensing.sensor import Unavailable

PATIENCE_S = 20.0


def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("READ_S", "STATE_S", "POLICY_S", "MACHINE_ID_S"):
        monkeypatch.setattr(assembly, name, 0.5)


@contextmanager
def hanging(path: Path) -> Iterator[None]:
    """Have every process that opens a file wait, as for a file server that does not answer."""
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    try:
        yield
    finally:
        path.rename(moved := path.with_name("answered"))
        with suppress(OSError):  # nobody waits
            os.close(os.open(moved, os.O_WRONLY | os.O_NONBLOCK))


def test_an_agent_starts_without_its_state_while_the_disk_hangs_and_learns_when_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()

    def unanswered(_: Path, *, set_aside: bool) -> tuple[SavedState, tuple[str, ...]]:
        assert answers.wait(PATIENCE_S)
        return SavedState(), ()

    monkeypatch.setattr(saved_state, "load", unanswered)
    hurry(monkeypatch)
    parts = assembly.assemble(options.parse(["serve", "--state-dir", str(tmp_path)]), keeps=True)
    assert "the disk has not answered" in parts.problems[0]
    assert (parts.folder, parts.claim) == (None, None), "it may not replace the state that it has not read"
    assert parts.disk_answers is not None
    assert parts.lost == parts.problems[0]
    assert not parts.disk_answers.is_set()
    answers.set()
    assert parts.disk_answers.wait(PATIENCE_S)


@pytest.mark.parametrize(
    "number", [errno.EIO, errno.EROFS, errno.EUCLEAN, errno.EBADMSG, errno.ENODEV, errno.ESTALE]
)
def test_an_agent_starts_on_a_node_whose_file_system_is_damaged_or_gone(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged(_: Path, *, set_aside: bool) -> tuple[SavedState, tuple[str, ...]]:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(saved_state, "load", damaged)
    parts = assembly.assemble(options.parse(["serve", "--state-dir", str(tmp_path)]), keeps=True)
    assert f"{tmp_path}: {os.strerror(number)}: the saved state is not used" in parts.problems
    assert parts.lost in parts.problems


def test_a_disk_that_hangs_at_the_start_does_not_keep_the_policy_from_being_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = tmp_path / "node.toml"
    policy.write_text('[xid.63]\nlevel = "degraded"\n')
    answers = threading.Event()

    def unanswered(self: PolicyFile) -> object:
        assert self._kept is None or answers.wait(PATIENCE_S)
        return original(self)

    original = PolicyFile._recall
    monkeypatch.setattr(PolicyFile, "_recall", unanswered)
    hurry(monkeypatch)
    words = ["serve", "--state-dir", str(tmp_path / "state"), "--policy", str(policy)]
    parts = assembly.assemble(options.parse(words), keeps=True)
    assert not answers.is_set()
    answers.set()
    assert parts.disk_answers is not None
    assert (parts.folder, parts.policy.xids[63].level) == (None, Level.DEGRADED)
    assert parts.disk_answers.wait(PATIENCE_S)


def test_a_policy_file_that_does_not_answer_leaves_the_last_good_one_in_force_until_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, state = tmp_path / "node.toml", tmp_path / "state"
    asked = options.parse(["serve", "--state-dir", str(state), "--policy", str(policy)])
    policy.write_text('[xid.63]\nlevel = "degraded"\n')
    first = assembly.assemble(asked, keeps=True)
    assert first.claim is not None
    first.claim.release()
    hurry(monkeypatch)
    with hanging(policy):
        parts = assembly.assemble(asked, keeps=True)
    assert (parts.folder, parts.problems, parts.disk_answers) == (state, (), None), "the state is in use"
    assert parts.policy_file is not None
    assert (parts.policy.xids[63].level, parts.policy_file.current.rejected) == (Level.DEGRADED, True)
    assert "its disk does not answer" in parts.policy_file.current.problem
    policy.write_text('[xid.63]\nlevel = "unhealthy"\n')
    for _ in range(2):
        parts.policy_file.read()
    assert parts.policy_file.current.policy.xids[63].level is Level.UNHEALTHY
    assert not parts.policy_file.current.rejected


def test_an_agent_starts_with_the_shipped_policy_if_neither_disk_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, state = tmp_path / "node.toml", tmp_path / "state"
    state.mkdir()
    hurry(monkeypatch)
    with hanging(policy), hanging(state / "memory.json"):
        asked = options.parse(["serve", "--state-dir", str(state), "--policy", str(policy)])
        parts = assembly.assemble(asked, keeps=True)
        assert (parts.folder, parts.policy) == (None, shipped())
    assert "the disk has not answered" in parts.problems[0]
    assert parts.disk_answers is not None
    assert parts.disk_answers.wait(PATIENCE_S)


def test_a_start_without_a_file_is_no_loss_and_one_with_a_damaged_file_is(tmp_path: Path) -> None:
    asked = options.parse(["serve", "--state-dir", str(tmp_path)])

    def lost(*, keeps: bool) -> str:
        parts = assembly.assemble(asked, keeps=keeps)
        if parts.claim is not None:
            parts.claim.release()
        return parts.lost

    assert lost(keeps=True) == ""
    saved_state.save(tmp_path, SavedState())
    assert lost(keeps=True) == ""
    (tmp_path / saved_state.NAME).write_bytes(b"torn")
    assert lost(keeps=False) == "", "what only reads reports a problem"
    assert "is not used" in lost(keeps=True)
    assert "has only files that could not be used" in lost(keeps=True), "it ended before it saved anything"


def test_a_look_starts_without_the_state_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hurry(monkeypatch)
    with hanging(tmp_path / "memory.json"):
        parts = assembly.assemble(options.parse(["check", "--state-dir", str(tmp_path)]), keeps=False)
    assert "the disk has not answered" in parts.problems[0]


def test_a_look_is_refused_if_its_policy_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hurry(monkeypatch)
    words = ["check", "--state-dir", str(tmp_path), "--policy", str(tmp_path / "node.toml")]
    with hanging(tmp_path / "node.toml"), pytest.raises(BadInput, match="the disk has not answered"):
        assembly.assemble(options.parse(words), keeps=False)


def test_the_history_of_a_disk_that_does_not_answer_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "ASK_S", 0.5)
    with hanging(tmp_path / "memory.json"), pytest.raises(BadInput, match="the disk has not answered"):
        commands.history(options.parse(["history", "--state-dir", str(tmp_path)]))


def test_an_agent_starts_without_the_machine_id_of_a_host_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hurry(monkeypatch)
    words = ["check", "--state-dir", str(tmp_path), "--root", str(tmp_path), "--node-name", "n1"]
    (tmp_path / "etc").mkdir()
    with hanging(tmp_path / "etc" / "machine-id"):
        parts = assembly.assemble(options.parse(words), keeps=False)
    assert (parts.identity["node"], parts.identity["machine_id"]) == ("n1", "")


@pytest.mark.parametrize(
    "words",
    [
        ["forget", "nvlinks", "--why", "exchanged"],
        ["release", "--for", "10m"],
        ["release", "--end"],
    ],
    ids=" ".join,
)
def test_a_request_to_a_disk_that_does_not_answer_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.setattr(commands, "ASK_S", 0.5)
    monkeypatch.setattr(claim, "is_owned", lambda _: True)
    asked = options.parse([*words, "--state-dir", str(tmp_path)])
    with (
        hanging(tmp_path / operator_requests.FILE),
        pytest.raises(BadInput, match=r"the disk has not answered for 0.5 s; .* may be recorded later"),
    ):
        getattr(commands, words[0])(asked)


def test_a_release_whose_acknowledgement_does_not_answer_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(commands, "CLOSE_S", 0.5)
    monkeypatch.setattr(claim, "is_owned", lambda _: True)
    with hanging(tmp_path / operator_requests.CLOSED):
        asked = options.parse(["release", "--for", "10m", "--state-dir", str(tmp_path)])
        assert commands.release(asked) == commands.NOT_CLOSED
    error = capsys.readouterr().err
    assert "has not closed NVML within 0.5 s, and the request was withdrawn" in error
    assert not _is_released(tmp_path), "a command that has failed leaves nothing in force"


def _is_released(folder: Path) -> bool:
    """Return True if an agent that starts on the folder now closes NVML for a release."""
    clock = clocks.begin(None, 0.0)
    requests = OperatorRequests(folder, clock)
    requests.read_ahead()
    return clock.now_s() < requests.released_until_s()


def test_an_interrupted_release_is_withdrawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(claim, "is_owned", lambda _: True)
    monkeypatch.setattr(commands, "_closed_for", interrupted)
    before = signal.getsignal(signal.SIGINT)
    asked = options.parse(["release", "--for", "10m", "--state-dir", str(tmp_path)])
    assert commands.release(asked) == 128 + signal.SIGINT
    assert not _is_released(tmp_path)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_release_without_an_agent_fails_and_leaves_no_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = options.parse(["release", "--for", "10m", "--state-dir", str(tmp_path)])
    assert commands.release(asked) == commands.NOT_CLOSED
    assert f"nothing was released: no agent is running on {tmp_path}" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [], "an agent that starts later would close NVML"


def test_the_end_of_a_release_is_recorded_for_an_agent_that_does_not_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    operator_requests.record_release(tmp_path, 600.0, "the agent ends during the release")
    assert _is_released(tmp_path)
    assert commands.release(options.parse(["release", "--end", "--state-dir", str(tmp_path)])) == 0
    assert (
        capsys.readouterr().out == f"ended: no agent is running on {tmp_path}; one that starts opens NVML\n"
    )
    assert not _is_released(tmp_path)


class Watched(type(Path())):  # type: ignore[misc]
    """A path that records each use of the disk."""

    used: ClassVar[list[str]] = []

    def stat(self, **how: Any) -> os.stat_result:
        self.used.append(str(self))
        found: os.stat_result = super().stat(**how)
        return found

    def open(self, *words: Any, **how: Any) -> IO[Any]:
        self.used.append(str(self))
        found: IO[Any] = super().open(*words, **how)
        return found


def test_only_the_sensors_that_say_so_use_the_disk_of_the_saved_state(tmp_path: Path) -> None:
    """Otherwise a disk that hangs would blind the sensors of the GPUs, and look like a hung driver."""
    asked = options.parse(["serve", "--kernel-log", "none", "--sys", str(tmp_path)])
    asked.state_dir = Watched(tmp_path / "state")
    parts = assembly.assemble(asked, keeps=True)
    assert {each.sensor.name for each in parts.sensors if each.reads_state} == {"operator", "policy"}
    operator_requests.record_forget(tmp_path / "state", "gpus", "", "")
    Watched.used.clear()
    for each in parts.sensors:
        if not each.reads_state:
            with suppress(Unavailable):
                each.sensor.open()
            with suppress(Unavailable):
                each.sensor.read()
            each.sensor.close()
    assert Watched.used == []
    list(parts.requests.read())
    assert Watched.used, "the path records what is read"


def test_bad_input_from_the_state_is_reported_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "state").touch()
    with pytest.raises(BadInput, match="expected a writable folder"):
        assembly.assemble(options.parse(["serve", "--state-dir", str(tmp_path / "state")]), keeps=True)


def test_the_name_of_the_node_is_an_option_or_the_variable_of_the_pod(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/machine-id").write_text("5f0a31c2\n")
    words = ["check", "--state-dir", str(tmp_path), "--root", str(tmp_path)]
    monkeypatch.setenv(options.NODE_NAME, "node-7")
    monkeypatch.setenv(options.PROVIDER_ID, "aws:///i-1")
    about = assembly.assemble(options.parse(words), keeps=False).about()
    assert (about["node"], about["machine_id"], about["provider_id"]) == ("node-7", "5f0a31c2", "aws:///i-1")
    named = assembly.assemble(options.parse([*words, "--node-name", "node-8"]), keeps=False).about()
    assert named["node"] == "node-8"


def test_a_report_says_when_the_machine_has_booted(tmp_path: Path) -> None:
    words = ["check", "--state-dir", str(tmp_path)]
    parts = assembly.assemble(options.parse(words), keeps=False)
    before_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    up_s = parts.clock.now_s() - parts.about()["booted_s"]
    assert before_s - 0.01 <= up_s <= time.clock_gettime(time.CLOCK_BOOTTIME) + 0.01

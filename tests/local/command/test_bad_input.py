"""Bad input: one line with the option, the value and what is expected; exit code 2; nothing is lost."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from supervisor.store.run_directory import newest, open_for_run
from tests.local.conftest import Start
from tests.local.running import SCRIPTS, Run
from tests.local.whole_command import Ended, holdfast

pytestmark = [pytest.mark.local, pytest.mark.timeout(120)]

STEADY = str(SCRIPTS / "steady.py")


def refused(ended: Ended, *words: str) -> None:
    """Assert exit code 2 and a single line that contains all of `words`."""
    assert ended.code == 2, ended.output
    assert len(ended.lines) == 1, ended.output
    assert all(word in ended.output for word in words), ended.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("run --nproc-per-nod 2 -- {steady} 5", ("--nproc-per-nod", "--nproc-per-node")),
        ("run --standbye 2 -- {steady} 5", ("--standbye", "--standby")),
        ("run -- python no_such.py", ("no_such.py",)),
        ("run ./a-script", ("'./a-script'", "'/no/such'", "does not exist")),
        ("run ./an-empty-one", ("'./an-empty-one'", "is an empty file")),
        ("run ./a-text", ("'./a-text'", "is a text file without an interpreter")),
        ("run .", ("'.' is a directory",)),
        ("run --skip-bad-batches -- python plain.py", ("--skip-bad-batches", "holdfast.join")),
        ("run", ("no command",)),
        ("run -m nosuch.module 5", ("module 'nosuch.module' not found",)),
        ("run --resume --run-dir mistyped -- {steady} 5", ("--resume", "mistyped", "--run-dir")),
        ("--run-dir d status", ("`holdfast status --run-dir ...`",)),
        ("run --nproc-per-node 0 -- {steady} 5", ("--nproc-per-node", "0")),
        ("run --members 0 -- {steady} 5", ("--members", "0")),
        ("run --nproc-per-node gpu -- {steady} 5", ("gpu",)),
        ("run --checkpoint-every never -- {steady} 5", ("--checkpoint-every", "never")),
        ("run --run-dir /proc/nowhere -- {steady} 5", ("/proc/nowhere",)),
        ("run --run-dir a-file -- {steady} 5", ("a-file",)),
        ("run --run-dir foreign -- {steady} 5", ("foreign",)),
        ("run --run-dir newer -- {steady} 5", ("newer", "format")),
        ("statu", ("statu", "status")),
        ("status --run-dir nothing", ("nothing",)),
        ("inject burn", ("burn", "kill")),
        ("explain i-9999 --run-dir foreign", ("foreign",)),
    ],
)
def test_bad_input_is_reported_in_one_line_and_changes_no_file(
    words: str, said: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "a-file").write_text("mine")
    (tmp_path / "plain.py").write_text("import torch\n")
    for name, content in (("a-script", "#!/no/such\n"), ("an-empty-one", ""), ("a-text", "print(1)\n")):
        (tmp_path / name).write_text(content)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "thesis.tex").write_text("mine")
    (tmp_path / "newer").mkdir()
    (tmp_path / "newer" / "format").write_text('{"holdfast_run": 99}')
    before = sorted(map(str, tmp_path.rglob("*")))
    ended = holdfast(*words.format(steady=STEADY).split(), cwd=tmp_path)
    refused(ended, *said)
    assert "Traceback" not in ended.output
    assert sorted(map(str, tmp_path.rglob("*"))) == before
    assert (tmp_path / "a-file").read_text() == "mine"


def last_line(ended: Ended, *words: str) -> None:
    """Assert exit code 2, and that the last line contains all of `words` and no other line contains any."""
    assert ended.code == 2, ended.output
    *before, last = ended.lines
    assert all(word in last for word in words), ended.output
    assert not any(word in line for word in words for line in before), ended.output


@pytest.mark.parametrize("words", ["./job", "./python3 plain.py", "--warm cold ./python3 plain.py"])
def test_a_program_that_the_kernel_refuses_ends_the_run_at_once(words: str, tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text("import torch\n")
    for name in ("job", "python3"):
        (tmp_path / name).write_bytes(b"\x7fELF\x02\x01\x01" + b"\0" * 9 + b"\x02\x00\xf3\x00" + b"\0" * 44)
        (tmp_path / name).chmod(0o755)
    ended = holdfast("run", "--plain", *words.split(), cwd=tmp_path)
    assert ended.code == 2, ended.output
    assert sum("is not a program for this machine" in line for line in ended.lines) == 1, ended.output
    assert not any("in a row" in line or "came before" in line for line in ended.lines), ended.output
    run = newest(tmp_path)
    assert run is not None
    status = json.loads((run / "status.json").read_text())
    assert status["generation"] <= 1, "the start was tried again"


def checkpoints(run: Run) -> list[str]:
    return sorted(path.name for path in (run.run_dir / "checkpoints").glob("step-*"))


def test_a_port_that_is_in_use_is_named_and_the_latest_run_stays_the_latest(tmp_path: Path) -> None:
    before = open_for_run(None, 0.0, tmp_path)
    before.name_latest(tmp_path)
    before.close()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = holdfast("run", "--port", str(port), "--", STEADY, "5", cwd=tmp_path)
    refused(ended, f"--port {port} is in use")
    assert newest(tmp_path) == before.path
    assert [each.name for each in (tmp_path / "holdfast-runs").iterdir() if not each.is_symlink()] == [
        before.path.name
    ]


def test_a_stopped_run_prints_a_command_that_resumes_it(start: Start) -> None:
    run = start("--plain", "steady.py", 10_000_000)
    run.steady(30)
    run.interrupt()
    ended = run.finish()
    assert ended.code == 130
    [line] = [line for line in ended.lines if line.startswith("holdfast: resume with: ")]
    words = shlex.split(line.partition("with: ")[2])
    assert words[:3] == ["holdfast", "run", "--resume"], "a mistyped directory must not start a new run"
    done = run.last_status()["checkpoint"]["step"]
    command = [str(done + 20) if word == "10000000" else word for word in words[1:]]
    again = holdfast(*command, cwd=run.folder)
    assert again.code == 0, again.output
    assert f"from step {done:,} (checkpoint)" in again.output
    once_more = holdfast(*command, cwd=run.folder)
    assert once_more.code == 0, once_more.output
    assert f"nothing to do: the state in {run.run_dir} is already at step {done + 20:,}" in once_more.output


def test_a_left_over_variable_of_holdfast_starts_no_rank(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, STEADY, "3"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HOLDFAST_START": "junk"},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("how", ["exec", "hidden"])
def test_a_script_that_reexecutes_itself_is_refused(how: str, tmp_path: Path) -> None:
    again = SCRIPTS / "reexec.py"
    ended = holdfast("run", "--plain", "--nproc-per-node", "2", sys.executable, again, how, cwd=tmp_path)
    assert ended.code == 2, ended.output
    assert "rank 0 of" not in ended.output
    said = [line for line in ended.lines if "OMP_NUM_THREADS=4 holdfast run" in line]
    assert len(said) == 1, ended.output


def test_a_script_behind_a_link_finds_the_modules_beside_the_links_target(
    start: Start, tmp_path: Path
) -> None:
    (tmp_path / "link.py").symlink_to(SCRIPTS / "steady.py")
    assert start("", "link.py", 5).finish().code == 0


def test_a_checkpoint_of_another_model_or_world_size_is_refused_and_kept(start: Start) -> None:
    run = start("--nproc-per-node 2", "steady.py", 10_000_000, 64)
    run.steady()
    in_use = holdfast("run", "--run-dir", run.run_dir, "--", STEADY, "5", cwd=run.folder)
    refused(in_use, "in use", str(run.process.pid))
    run.interrupt()
    assert run.finish().code == 130
    held = checkpoints(run)
    ended = start(f"--nproc-per-node 2 --run-dir {run.run_dir}", "steady.py", 50, 128, into="b").finish()
    last_line(
        ended, "model.0.weight has shape [64, 32] in the snapshot and [128, 32] in the script", held[-1]
    )
    ended = start(f"--nproc-per-node 1 --run-dir {run.run_dir}", "steady.py", 50, into="c").finish()
    last_line(ended, "has world size 2, but this run has 1", held[-1])
    assert checkpoints(run) == held


def test_status_of_a_finished_run_is_json(start: Start) -> None:
    run = start("", "steady.py", 5)
    assert run.finish().code == 0
    shown = holdfast("status", "--json", "--run-dir", run.run_dir, cwd=run.folder)
    assert shown.code == 0
    assert json.loads(shown.output)["step"] == 5
    assert json.loads(shown.output)["exit_code"] == 0

"""Members, and Holdfast's own processes, are forked from one process with the script's imports."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.inspection import process_stats
from holdfast.process import title
from holdfast.protocol.rank_channel import WorkerOrder
from supervisor.local.keeper import process_specs
from supervisor.local.keeper.processes import ForkServerClient, ProcessTable
from tests.local.conftest import Start
from tests.local.running import Json, Run
from tests.local.waiting import GONE_S, until

pytestmark = [pytest.mark.local, pytest.mark.timeout(120)]

DIES = """
import os, pathlib
if not pathlib.Path('imported').exists():
    pathlib.Path('imported').touch()
    os._exit(9)
"""


def launchers(run: Run, count: int) -> list[Json]:
    """Wait until `count` members have a launcher that has reported; return them."""

    def look(status: Json) -> list[Json]:
        found = [each for each in status["members"] if each["launcher_pid"]]
        return found if len(found) == count else []

    return look(run.wait(look, f"{count} members"))


def replaced(run: Run) -> Json:
    """Kill the standby's launcher, and return the member that replaces it."""
    before = run.steady()["members"]
    [lost] = [each for each in before if each["role"] == "standby"]
    os.kill(lost["launcher_pid"], signal.SIGKILL)
    run.wait(lambda status: lost["name"] not in {each["name"] for each in status["members"]}, "its loss")
    [made] = [each for each in launchers(run, 2) if each["role"] == "standby"]
    assert made["name"] not in {each["name"] for each in before}
    return made


def is_forked(member: Json) -> bool:
    shown = Path(f"/proc/{member['launcher_pid']}/cmdline").read_bytes().rstrip(b"\0")
    return shown == f"holdfast: launcher {member['name']}".encode()


def children(run: Run) -> list[Path]:
    """Return the /proc folders of the children of `holdfast run`."""
    pids = Path(f"/proc/{run.process.pid}/task/{run.process.pid}/children").read_text().split()
    return [Path("/proc") / pid for pid in pids]


def template_of(run: Run, members: list[Json]) -> int:
    """Return the child of `holdfast run` that its launchers were forked from."""
    launchers = [each["launcher_pid"] for each in members]
    [found] = [
        int(each.name)
        for each in children(run)
        if int(each.name) not in launchers
        and title.MEMBERS_FORK_SERVER.encode() in (each / "cmdline").read_bytes()
    ]
    return found


def forked_parts(run: Run) -> dict[str, list[int]]:
    """Return the pids of the parts' template and the processes forked from it, by their titles."""
    found: dict[str, list[int]] = {}
    for each in children(run):
        with contextlib.suppress(OSError):  # it has already ended
            shown = (each / "cmdline").read_text().rstrip("\0").removeprefix(title.PREFIX)
            if shown == title.PARTS_FORK_SERVER or shown.split(" ")[0] in ("supervisor", "sidecar"):
                found.setdefault(shown.split(" ")[0], []).append(int(each.name))
    return found


def test_a_lost_member_is_forked_again_or_started_directly_if_the_template_is_stuck(start: Start) -> None:
    run = start("--members 1 --standby 1 --checkpoint-every 0", "steady.py", 10_000_000)
    before = launchers(run, 2)
    assert all(map(is_forked, before))
    assert is_forked(replaced(run))
    pid = template_of(run, launchers(run, 2))
    os.kill(pid, signal.SIGSTOP)
    assert not is_forked(replaced(run))
    until(lambda: None if Path(f"/proc/{pid}").exists() else True, "the template has ended", GONE_S)
    assert run.running()["incidents"] == 0
    assert run.stop().code == 130


def shown_by_ps(pid: int, column: str) -> str:
    return subprocess.run(
        ["ps", "-o", f"{column}=", "-p", str(pid)], capture_output=True, text=True, check=True
    ).stdout.strip()


def test_ranks_and_warm_processes_are_named(start: Start) -> None:
    run = start("--nproc-per-node 2", "steady.py", 10_000_000)
    run.steady()
    assert [shown_by_ps(run.pid(n), "comm") for n in (0, 1)] == ["rank 0", "rank 1"]
    assert [shown_by_ps(run.pid(n), "args") for n in (0, 1)] == [
        f"holdfast: rank {n} steady.py" for n in (0, 1)
    ]
    below = process_stats.descendants(run.process.pid)
    titles = {shown_by_ps(pid, "args") for pid in below if Path(f"/proc/{pid}").exists()}
    assert titles >= {
        *(f"holdfast: {each}" for each in ("supervisor", "sidecar m0", "launcher m0")),
        *(f"holdfast: warm process {n}" for n in (0, 1)),
        *(
            f"holdfast: {each}"
            for each in (title.MEMBERS_FORK_SERVER, title.PARTS_FORK_SERVER, title.RANKS_FORK_SERVER)
        ),
    }
    run.broken(lambda: run.inject("kill", 1))
    assert shown_by_ps(run.pid(1), "args") == "holdfast: rank 1 steady.py"
    assert run.stop().code == 130


def test_an_import_that_ends_the_process_ends_only_the_template(start: Start, tmp_path: Path) -> None:
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "dies.py").write_text(DIES)
    script = tmp_path / "script.py"
    script.write_text("import dies\nimport threading\n\nthreading.Event().wait()\n")
    run = start("--members 1", str(script), PYTHONPATH=str(tmp_path / "packages"))
    [member] = launchers(run, 1)
    assert not is_forked(member)
    assert run.stop().code == 130


def sidecars(run: Run, other_than: int) -> list[int]:
    """Wait until both members have a sidecar that is not `other_than`; return them."""

    def look(status: Json) -> list[int]:
        found = [each["sidecar_pid"] for each in status["members"] if each["connected"]]
        return found if len(found) == 2 and other_than not in found else []

    return look(run.wait(look, "both sidecars"))


def test_parts_are_forked_or_started_directly_if_their_template_is_stuck(start: Start) -> None:
    run = start("--members 1 --standby 1 --checkpoint-every 0", "steady.py", 10_000_000)
    status = run.steady()
    assert {each["name"] for each in status["members"]} == {"m0", "m1"}, (
        "a member counted as lost at the start"
    )
    parts = forked_parts(run)
    [template] = [
        pid for name, pids in parts.items() for pid in pids if name not in ("supervisor", "sidecar")
    ]
    assert sorted(parts["sidecar"]) == sorted(each["sidecar_pid"] for each in status["members"])

    [supervisor] = parts["supervisor"]
    os.kill(supervisor, signal.SIGKILL)
    until(
        lambda: forked_parts(run).get("supervisor", [supervisor]) != [supervisor], "a new supervisor", GONE_S
    )

    os.kill(template, signal.SIGSTOP)
    lost = run.steady()["members"][0]["sidecar_pid"]
    os.kill(lost, signal.SIGKILL)
    alive = sidecars(run, lost)
    assert len(forked_parts(run)["sidecar"]) == 1, "the new one was started without the template"
    assert template not in [int(each.name) for each in children(run)], "the template is still running"
    assert lost not in alive
    assert run.running()["incidents"] == 0
    assert run.stop().code == 130


def test_a_template_that_imports_for_too_long_is_ended(tmp_path: Path) -> None:
    selector, settled = selectors.DefaultSelector(), list[float]()
    children = ProcessTable(tmp_path, selector, lambda _: None)
    now_s = 100.0
    template = ForkServerClient("slow", children, lambda: settled.append(now_s), 5.0)
    forever = process_specs.ProcessSpec((sys.executable, "-c", "import signal; signal.pause()"), os.environ)
    template.start(lambda _: forever, now_s)
    for now_s in (104.9, 105.1, 200.0):
        template.poll(now_s)
    assert settled == [105.1]
    assert not template.importing
    assert template.fork("a part", WorkerOrder("part", argv=("sidecar",))) is None
    for key, _ in selector.select():
        key.data()
    assert children.alive() == []

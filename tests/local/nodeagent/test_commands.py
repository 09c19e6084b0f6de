"""`holdfast node` as a user runs it, with the fake GPU library where GPUs are needed."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from holdfast import parts
from holdfast.process.clock import boot_id
from nodeagent.agent import saved_state
from nodeagent.agent.saved_state import SavedState
from nodeagent.cli import commands, options
from nodeagent.evaluation.evaluator import Evaluator
from nodeagent.model import Observation
from nodeagent.policy.loading import shipped
from nodeagent.sensing.baselines import Forgotten
from nodeagent.sensing.clock import Anchor, Clock
from nodeagent.sensing.operator_requests import OperatorRequests
from tests.fakenvml.state import Fake
from tests.local.nodeagent.serving import PATIENCE_S, node, serving
from tests.unit.nodeagent.sysfs.tree import realistic

STOP_S = 2.0


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[Fake]:
    with Fake(tmp_path / "fake", gpus=2) as made:
        yield made


def test_without_a_gpu_the_host_is_checked_and_the_missing_driver_reported(tmp_path: Path) -> None:
    done = node("check", "--state-dir", str(tmp_path), "--for", "0.5")
    assert done.returncode in (0, 1, 3), done.stderr  # this machine may lack some resource
    assert "nvml-polling: no NVIDIA driver" in done.stdout
    found = json.loads(node("check", "--state-dir", str(tmp_path), "--for", "0.5", "--json").stdout)
    assert {"disk//", "node"} <= {each["entity"] for each in found["entities"]}


def test_the_exit_code_is_the_worst_level(tmp_path: Path, fake: Fake) -> None:
    words = ("check", "--state-dir", str(tmp_path), "--for", "0.5", "--kernel-log", "none")
    fake.gpu(0).remap_pending = 1
    done = node(*words, fake=fake)
    assert done.returncode == 1, done.stdout
    fake.gpu(1).remap_failure = 1
    done = node(*words, fake=fake)
    assert done.returncode == 2, done.stdout
    assert fake.entity(1) in done.stdout
    assert "replace the hardware" in done.stdout
    assert not list(tmp_path.glob("memory*")), "a check writes no record"


def test_missing_gpus_are_unhealthy_at_once_if_their_number_is_given(tmp_path: Path, fake: Fake) -> None:
    words = ("check", "--state-dir", str(tmp_path), "--for", "0.5s", "--kernel-log", "none", "--json")
    done = node(*words, "--gpus", "8", fake=fake)
    assert done.returncode == 2, done.stdout
    found = json.loads(done.stdout)
    [finding] = [f for e in found["entities"] for f in e["findings"] if f["check"] == "gpu_count"]
    assert (finding["level"], finding["action"]) == ("unhealthy", "reboot_node")
    assert "gpu_count" not in node(*words, "--gpus", "2", fake=fake).stdout


def test_without_a_driver_library_promised_gpus_are_not_evaluated_and_no_reboot_is_recommended(
    tmp_path: Path,
) -> None:
    words = ("check", "--state-dir", str(tmp_path), "--for", "0.5", "--kernel-log", "none", "--gpus", "8")
    done = node(*words, "--json")
    assert done.returncode == 2, "an operator has promised GPUs, and no job could use them"
    found = json.loads(done.stdout)
    [finding] = [f for e in found["entities"] for f in e["findings"] if f["check"] in ("nvml", "gpu_count")]
    assert (finding["check"], finding["level"], finding["action"]) == ("nvml", "unhealthy", "contact_support")
    assert "install the NVIDIA driver" in finding["why"]
    assert found["action"] == "contact_support"
    [unread] = [each for each in found["undecided"] if each["check"] == "gpu_state"]
    assert unread == {
        "entity": "node",
        "check": "gpu_state",
        "why": "none of the 8 expected GPUs could be evaluated: nvmlInit: LIBRARY_NOT_FOUND",
    }
    assert "reboot" not in node(*words).stdout


def test_missing_infiniband_ports_are_unhealthy_at_once_if_their_number_is_given(tmp_path: Path) -> None:
    tree = realistic(tmp_path / "sys")
    state = str(tmp_path / "state")
    words = ("check", "--state-dir", state, "--sys", str(tree.root), "--for", "0.5s", "--kernel-log", "none")
    assert "ib_port_count" not in node(*words, "--json", "--ib-ports", "2").stdout
    for there in (2, 1, 0):
        done = node(*words, "--json", "--ib-ports", "3")
        assert done.returncode == 2, done.stdout
        found = json.loads(done.stdout)
        [finding] = [f for e in found["entities"] for f in e["findings"] if f["check"] == "ib_port_count"]
        assert (finding["level"], finding["action"]) == ("unhealthy", "contact_support")
        assert finding["evidence"] == [f"{there} of 3 expected ports are present"]
        if there:
            tree.remove(f"class/infiniband/mlx5_{there - 1}")
    tree.remove("class/infiniband")
    assert node(*words, "--ib-ports", "1").returncode == 2


def test_a_node_with_undecided_checks_is_not_called_healthy(tmp_path: Path, fake: Fake) -> None:
    """The driver is gone, perhaps because its pod restarts: the node is neither healthy nor faulty yet."""
    words = ("check", "--state-dir", str(tmp_path), "--for", "0.5", "--kernel-log", "none")
    with serving(tmp_path, fake) as agent:  # it remembers that there are two GPUs
        agent.until(lambda health: len(health["gpus"]) == 2)
        agent.end()
    done = node(*words, "--json")
    found = json.loads(done.stdout)
    assert ("driver", "nvml") in {(each["entity"], each["check"]) for each in found["undecided"]}
    if found["level"] != "degraded":  # this machine may lack some resource
        assert (done.returncode, found["level"]) == (3, "unknown")
    table = node(*words).stdout.partition("not evaluated within 0.5 s:\n")[2]
    assert re.search(r"^unknown    driver nvml +NVIDIA driver is library_missing", table, re.MULTILINE)


def test_counters_are_judged_within_a_short_check(tmp_path: Path, fake: Fake) -> None:
    words = ("check", "--state-dir", str(tmp_path), "--for", "2", "--kernel-log", "none", "--json")
    found = json.loads(node(*words, fake=fake).stdout)
    assert [each for each in found["undecided"] if each["entity"].startswith("gpu/")] == []


def test_an_xid_becomes_a_verdict_is_reported_once_and_not_again_after_a_kill(
    tmp_path: Path, fake: Fake
) -> None:
    state = tmp_path / "state"
    with serving(state, fake) as agent:
        fake.until(lambda s: s.event_sets > 0)
        fake.xid(1, 79)
        found = agent.finding(fake.entity(1), "xid", 79)
        assert (found["action"], found["sources"]) == ("reboot_node", ["nvml-events"])
        told = agent.events()
        assert [(each["kind"], each["code"]) for each in told] == [("raised", 79)]
        agent.end(signal.SIGKILL)
    with serving(state, fake) as agent:
        agent.finding(fake.entity(1), "xid", 79)
        assert [each["seq"] for each in agent.events()] == [1]
        agent.end()
    history = json.loads(node("history", "--state-dir", str(state), "--json").stdout)
    assert [each["code"] for each in history["events"]] == [79]


def test_a_finding_that_an_operator_clears_is_reported_as_cleared(tmp_path: Path, fake: Fake) -> None:
    with serving(tmp_path, fake) as agent:
        fake.until(lambda s: s.event_sets > 0)
        fake.xid(0, 79)
        agent.finding(fake.entity(0), "xid", 79)
        unknown = node("clear", "gpu/0000:ff:00.0", "--state-dir", str(tmp_path))
        assert (unknown.returncode, "expected" in unknown.stderr) == (2, True)
        written = fake.entity(0).upper().replace("GPU/", "gpu/")
        assert agent.get("/v1/health")["clean_s"] == 0
        assert node("clear", written, "--state-dir", str(tmp_path)).returncode == 0
        assert [each["kind"] for each in agent.events(after=1)] == ["cleared"]
        well = agent.until(lambda health: health["clean_s"] > 0)
        assert well["clean_s"] <= well["calmed_s"]


def test_a_baseline_that_an_operator_has_forgotten_is_recorded(tmp_path: Path) -> None:
    evaluator = Evaluator(shipped())
    for entity in ("gpu/0000:3b:00.0", "net/eth0"):
        evaluator.add(Observation(1.0, "gpu_state" if entity < "n" else "net_down", entity, "sysfs"))
    saved_state.save(tmp_path, SavedState(evidence=evaluator.dump()))
    for words, expected in (
        (("nvlinks", "net/eth0"), "expected gpu/... with nvlinks: gpu/0000:3b:00.0"),
        (("nvlinks", "gpu/0000:3c:00.0"), "did you mean gpu/0000:3b:00.0?"),
        (("interfaces", "eth0"), "did you mean net/eth0?"),
        (("gpus", "gpu/0000:3b:00.0"), "expected no --entity"),
    ):
        refused = node("forget", words[0], "--entity", words[1], "--state-dir", str(tmp_path))
        assert (refused.returncode, expected in refused.stderr) == (2, True), refused.stderr
        assert repr(words[1]) in refused.stderr
    assert not (tmp_path / "cleared.jsonl").exists()
    done = node("forget", "nvlinks", "--entity", "gpu/0000:3B:00.0", "--state-dir", str(tmp_path))
    assert (done.returncode, "nvlinks of gpu/0000:3b:00.0" in done.stdout) == (0, True)
    reader = OperatorRequests(tmp_path, Clock(Anchor(boot_id(), 0.0)))
    assert list(reader.read()) == [], "an entity whose baseline is forgotten is not cleared"
    assert list(reader.forgets.after(0)) == [(1, Forgotten("nvlinks", "gpu/0000:3b:00.0"))]
    unknown = node("forget", "everything", "--state-dir", str(tmp_path))
    assert (unknown.returncode, "nvlinks" in unknown.stderr) == (2, True)


def test_a_running_agent_forgets_a_baseline_at_an_operators_word(tmp_path: Path, fake: Fake) -> None:
    policy = tmp_path / "node.toml"
    policy.write_text("[checks.gpu_count]\nunhealthy = { at = 1, need = 1, of = 1 }\nclear_s = 0\n")
    with serving(tmp_path, fake, "--policy", str(policy)) as agent:
        agent.until(lambda health: len(health["gpus"]) == 2)
        fake.vanish(1)
        agent.finding("node", "gpu_count")
        assert node("forget", "gpus", "--state-dir", str(tmp_path)).returncode == 0
        agent.until(lambda health: "gpu_count" not in json.dumps(health["entities"]))


@pytest.mark.parametrize("function", ["nvmlDeviceGetFieldValues", "nvmlEventSetWait_v2"])
def test_a_call_that_never_returns_is_a_finding_and_delays_neither_the_other_sensors_nor_the_end(
    tmp_path: Path, fake: Fake, function: str
) -> None:
    policy = tmp_path / "node.toml"
    policy.write_text("[checks.sensor_stuck]\ndegraded = { at = 5 }\n")
    with serving(tmp_path, fake, "--policy", str(policy)) as agent:
        agent.until(lambda health: all(each["calls"] for each in health["sensors"][:2]))
        fake.block(function)
        stuck = "nvml-events" if "Event" in function else "nvml-polling"
        found = agent.finding(f"sensor/{stuck}", "sensor_stuck")
        assert found["level"] == "degraded"
        assert found["evidence"][-1].startswith(f"in {function.removesuffix('_v2')}")
        assert f'holdfast_node_finding{{check="sensor_stuck",code="",entity="sensor/{stuck}"' in agent.get(
            "/metrics"
        )
        assert agent.get("/healthz") == "ok\n"
        if stuck == "nvml-polling":
            fake.xid(0, 79)
            agent.finding(fake.entity(0), "xid", 79)
        assert agent.end() < STOP_S


def test_the_agent_continues_after_its_output_is_closed(tmp_path: Path, fake: Fake) -> None:
    with serving(tmp_path, fake) as agent:
        fake.until(lambda s: s.event_sets > 0)
        assert agent.process.stdout is not None
        agent.process.stdout.close()
        agent.process.stdout = None
        for code in (79, 48):
            fake.xid(0, code)
            agent.finding(fake.entity(0), "xid", code)
        agent.end()
        assert agent.process.returncode == 0


def test_injection_reaches_a_test_agent_and_no_other(tmp_path: Path, fake: Fake) -> None:
    with serving(tmp_path, fake) as agent:
        refused = node("inject", "xid", "79", "--to", agent.address)
        assert refused.returncode == 2
        assert "refuses injections: start `holdfast node serve --test`" in refused.stderr
    with serving(tmp_path, fake, "--test") as agent:
        assert node("inject", "xid", "79", "--entity", fake.entity(0), "--to", agent.address).returncode == 0
        assert agent.finding(fake.entity(0), "xid", 79)["sources"] == ["injected"]
        line = "NVRM: Xid (PCI:0000:99:00): 48, pid=1, name=x, DBE"
        assert node("inject", "kernel", line, "--to", agent.address).returncode == 0
        agent.finding("gpu/0000:99:00.0", "xid", 48)
        assert node("inject", "sample", "heat=1", "--to", agent.address).returncode == 2
        assert agent.get("/v1/health")["test"] is True
        agent.end()
    assert (tmp_path / "test" / "memory.json").exists()
    assert not json.loads(node("history", "--state-dir", str(tmp_path), "--json").stdout)["events"]
    assert node("inject", "xid", "79", "--to", "127.0.0.1:1").returncode == 2


def test_bad_input_is_reported_in_one_line_with_exit_code_2(tmp_path: Path) -> None:
    policy = tmp_path / "bad.toml"
    policy.write_text('[checks.heet]\nclear_s = "x"\n[xid.79]\naction = "explode"\n')
    broken = node("check", "--policy", str(policy))
    assert broken.returncode == 64
    assert "heet" in broken.stderr, "one run reports all mistakes"
    assert "explode" in broken.stderr
    for words in (["chek"], ["explain", "xid", "9999"], ["clear", "gpu"]):
        done = node(*words)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr


def test_bad_usage_of_check_is_not_taken_for_an_unhealthy_node() -> None:
    for words in (["--jsn"], ["--for", "soon"], ["--policy", "/nowhere/node.toml"]):
        done = node("check", *words)
        assert (done.returncode, done.stderr.count("\n")) == (64, 1), done.stderr


@contextmanager
def unwritable() -> Iterator[int]:
    """Yield a descriptor on a disk that is always full."""
    number = os.open("/dev/full", os.O_WRONLY)
    try:
        yield number
    finally:
        os.close(number)


def test_the_verdict_is_the_exit_code_even_if_the_output_cannot_be_written(
    tmp_path: Path, fake: Fake
) -> None:
    fake.gpu(1).remap_failure = 1
    words = ("check", "--state-dir", str(tmp_path), "--for", "0.5", "--kernel-log", "none")
    with unwritable() as full_disk:
        for more in ((), ("--json",)):
            done = node(*words, *more, fake=fake, stdout=full_disk)
            why = "the output cannot be written: No space left on device"
            assert (done.returncode, done.stderr) == (2, f"holdfast: the node is unhealthy, but {why}\n")


def test_other_commands_report_output_that_cannot_be_written(tmp_path: Path) -> None:
    with unwritable() as full_disk:
        done = node("explain", "xid", "79", stdout=full_disk)
    assert (done.returncode, done.stderr) == (
        120,
        "holdfast: the output cannot be written: No space left on device\n",
    )


def test_a_check_that_fails_is_not_taken_for_a_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pynvml.py").write_text("raise RuntimeError('a broken installation')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = node("check", "--state-dir", str(tmp_path), "--for", "0.2")
    assert done.returncode == 3
    assert "RuntimeError: a broken installation\n" in done.stderr
    assert done.stderr.endswith("holdfast: the check failed, so the node was not evaluated\n")
    assert node("history", "--state-dir", str(tmp_path)).returncode == 1, "a defect has a traceback"


@pytest.mark.parametrize(("command", "code"), [("check", 64), ("watch", 2)])
def test_a_missing_package_is_not_taken_for_a_verdict(command: str, code: int) -> None:
    program = parts.command("nodeagent", command)
    done = subprocess.run(  # -S: no package of the installation can be imported
        [program[0], "-S", *program[1:]], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert (done.returncode, done.stderr.count("\n")) == (code, 1), done.stderr
    assert "which this Python lacks; run" in done.stderr


def test_a_check_in_which_every_sensor_is_blind_is_not_healthy(tmp_path: Path) -> None:
    blind = ["--sys", str(tmp_path), "--proc", str(tmp_path), "--kernel-log", "none"]
    words = ["check", "--for", "0.3", "--state-dir", str(tmp_path / "state"), *blind]
    done = node(*words)
    assert (done.returncode, "not evaluated within 0.3 s:" in done.stdout) == (3, True), done.stdout
    assert node(*words, "--allow-blind").returncode == 0


def unhindered(tmp_path: Path) -> list[str]:
    """Return the words of a check that judges nothing but the saved state."""
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    blind = ["--sys", str(nothing), "--proc", str(nothing), "--kernel-log", "none", "--allow-blind"]
    return ["check", "--for", "0.3", "--state-dir", str(tmp_path / "state"), *blind]


def test_a_check_that_cannot_read_the_state_does_not_call_the_node_healthy(tmp_path: Path) -> None:
    words, state = unhindered(tmp_path), tmp_path / "state" / saved_state.NAME
    assert node(*words).returncode == 0, "an agent that has never run is no problem"
    saved_state.save(tmp_path / "state", saved_state.SavedState())
    assert node(*words).returncode == 0
    state.write_bytes(state.read_bytes()[:-1])
    done = node(*words)
    assert (done.returncode, "unknown    sensor/memory" in done.stdout) == (3, True), done.stdout
    state.unlink()
    os.mkfifo(state)  # opening it hangs, as on a disk that does not answer
    done = node(*words, "--json")
    found = json.loads(done.stdout)
    assert (done.returncode, found["level"], found["undecided"][0]["entity"]) == (
        3,
        "unknown",
        "sensor/memory",
    )
    assert "the disk has not answered" in found["undecided"][0]["why"]


class Exited(Exception):
    pass


def check_here(monkeypatch: pytest.MonkeyPatch, words: list[str]) -> int:
    """Return the exit code of a check that runs in this process."""

    def exited(code: int) -> None:
        raise Exited(code)

    monkeypatch.setattr(commands, "_exit", exited)
    with pytest.raises(Exited) as end:
        commands.check(options.parse(words))
    return int(end.value.args[0])


def test_a_check_without_the_state_of_another_users_agent_does_not_call_the_node_healthy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words, service = unhindered(tmp_path), tmp_path / "service"
    monkeypatch.setattr(commands, "ROOT_STATE", service)
    assert check_here(monkeypatch, words) == 0
    service.mkdir()
    (service / "lock").touch()
    assert check_here(monkeypatch, words) == 3
    assert "is empty, so this does not include what the agent saved in" in capsys.readouterr().out
    answers = threading.Event()
    monkeypatch.setattr(commands, "ASK_S", 0.2)
    monkeypatch.setattr(commands, "_foreign_memory", lambda _: answers.wait(PATIENCE_S) and None)
    assert check_here(monkeypatch, words) == 3
    answers.set()
    assert "it may have a saved state" in capsys.readouterr().out


def test_a_check_says_that_the_memory_of_another_user_is_not_included(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = tmp_path / "service"
    service.mkdir()
    (service / "lock").touch()
    monkeypatch.setattr(commands, "ROOT_STATE", service)
    mine = tmp_path / "mine"
    asked = argparse.Namespace(state_dir=mine)
    assert f"{mine} is empty" in (commands._foreign_memory(asked) or "")
    saved_state.save(mine, saved_state.SavedState())
    assert commands._foreign_memory(asked) is None
    asked.state_dir = service
    assert commands._foreign_memory(asked) is None


def test_a_state_folder_has_one_agent_at_a_time(tmp_path: Path, fake: Fake) -> None:
    with serving(tmp_path, fake) as agent:
        done = node("serve", "--listen", "127.0.0.1:0", "--state-dir", str(tmp_path))
        assert done.returncode == 2
        assert f"in use by another agent, process {agent.process.pid}" in done.stderr
    with serving(tmp_path, fake) as again:  # the kill released the lock
        assert again.get("/healthz") == "ok\n"


def test_an_address_that_is_in_use_is_reported(tmp_path: Path, fake: Fake) -> None:
    with serving(tmp_path / "one", fake) as agent:
        done = node("serve", "--listen", agent.address, "--state-dir", str(tmp_path / "two"))
        assert done.returncode == 2
        assert agent.address in done.stderr


SQUATTER = """
import os, socket
if os.getuid() == 0:
    os.setuid(65534)
taken = socket.create_server(("127.0.0.1", 0))
print(taken.getsockname()[1], flush=True)
while True:
    with taken.accept()[0] as one:
        one.sendall(b"HTTP/1.1 200 OK\\r\\n\\r\\n" + (b"ok\\n" if os.getuid() == 65534 else b""))
"""


def test_another_user_who_has_taken_the_port_does_not_keep_the_agent_from_watching(
    tmp_path: Path, fake: Fake
) -> None:
    with subprocess.Popen([sys.executable, "-c", SQUATTER], stdout=subprocess.PIPE, text=True) as squatter:
        assert squatter.stdout is not None
        taken = f"127.0.0.1:{int(squatter.stdout.readline())}"
        try:
            words = ("--listen", taken, "--probe-listen", "127.0.0.1:0")
            with serving(tmp_path, fake, *words) as agent:
                assert agent.process.stdout is not None
                problem = json.loads(agent.process.stdout.readline())
                assert problem["event"] == "listen_problem"
                assert f"--listen {taken}: " in problem["why"]
                fake.until(lambda s: s.event_sets > 0)
                fake.xid(0, 79)
                assert json.loads(agent.process.stdout.readline())["code"] == 79
                squatter.kill()
                lines = map(json.loads, agent.process.stdout)
                listening = next(each for each in lines if each["event"] == "listening")
                assert listening["listen"] == taken
                agent.address = taken
                agent.until(lambda health: not health["problems"])
                agent.end()
        finally:
            squatter.kill()


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    """Yield a folder on a full disk."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k,nr_inodes=24", "none", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a file system")
    try:
        fill(disk)
        yield disk
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def fill(disk: Path) -> None:
    """Leave no room for a byte or for another file."""
    with suppress(OSError), (disk / "ballast").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    with suppress(OSError):
        for number in range(100):
            (disk / f"ballast{number}").touch()


def make_room(disk: Path) -> None:
    for each in disk.glob("ballast*"):
        each.unlink()


def test_an_agent_starts_on_a_full_disk_and_saves_its_state_once_there_is_room(
    full: Path, fake: Fake
) -> None:
    state = full / "state"
    with serving(state, fake) as agent:
        agent.until(lambda health: any("No space left" in each for each in health["problems"]))
        fake.until(lambda s: s.event_sets > 0)
        fake.xid(0, 79)
        agent.finding(fake.entity(0), "xid", 79)
        agent.finding("sensor/memory", "memory_lost")
        make_room(full)
        fake.xid(1, 48)
        agent.finding(fake.entity(1), "xid", 48)
        agent.end()
    fill(full)
    with serving(state, fake) as agent:
        assert agent.finding(fake.entity(0), "xid", 79)["code"] == 79
        agent.end()


def test_an_agent_whose_state_is_damaged_vouches_for_nothing_until_an_operator_has_looked(
    tmp_path: Path, fake: Fake
) -> None:
    (tmp_path / saved_state.NAME).write_bytes(b"torn")
    with serving(tmp_path, fake) as agent:
        finding = agent.finding("sensor/memory", "state_lost")
        assert (finding["level"], finding["clears"]) == ("degraded", "1 h without another")
        lost = agent.until(lambda health: all(each["calls"] for each in health["sensors"]))
        assert (lost["clean_s"], lost["quiet_s"]) == (0.0, 0.0)
        agent.end()
    with serving(tmp_path, fake) as agent:
        assert agent.finding("sensor/memory", "state_lost"), "a restart does not end it"
        assert agent.get("/v1/health")["state_id"] == lost["state_id"]
        done = node("clear", "sensor/memory", "--why", "no fault was known", "--state-dir", str(tmp_path))
        assert done.returncode == 0, done.stderr
        agent.until(lambda health: health["clean_s"] > 0)
        agent.end()


def test_an_agent_that_cannot_end_does_not_bar_its_successor(tmp_path: Path, fake: Fake) -> None:
    """A stopped process keeps its lock and its port, as does one with a thread in an uninterruptible call."""
    with serving(tmp_path, fake) as stopped:
        fake.until(lambda s: s.event_sets > 0)
        fake.xid(0, 79)
        assert [each["code"] for each in stopped.events()] == [79]  # it is saved
        stopped.process.send_signal(signal.SIGSTOP)
        with serving(tmp_path, fake, "--listen", stopped.address) as agent:
            assert agent.address == stopped.address
            found = agent.until(lambda health: bool(health["problems"]))
            assert f"took over from process {stopped.process.pid}" in found["problems"][0]
            agent.finding(fake.entity(0), "xid", 79)
            assert {agent.get("/healthz") for _ in range(20)} == {"ok\n"}, "no request reaches the old one"
            stopped.process.send_signal(signal.SIGCONT)
            stopped.process.communicate(timeout=PATIENCE_S)
            assert stopped.process.returncode == 2
            assert agent.get("/healthz") == "ok\n"
            agent.end()
    with serving(tmp_path, fake) as again:
        assert again.until(lambda health: bool(health["gpus"]))["problems"] == []
        again.end()
    assert (tmp_path / "memory.json").exists()
    assert not (tmp_path / "memory.1.json").exists()


def test_probes_have_an_address_of_their_own(tmp_path: Path, fake: Fake) -> None:
    with serving(tmp_path, fake, "--probe-listen", "127.0.0.1:0") as agent:
        address = str(agent.first["probe_listen"])
        assert address != agent.address
        with urllib.request.urlopen(f"http://{address}/healthz", timeout=PATIENCE_S) as answer:
            assert answer.read() == b"ok\n"
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"http://{address}/v1/health", timeout=PATIENCE_S)
        agent.end()

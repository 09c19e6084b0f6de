"""The command line on a real cluster: with the user's own rights, and as a plugin of kubectl."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.apparatus.kubernetes_cluster import REQUEST_S, ROOT, ClusterUnderTest
from tests.cluster.apparatus.namespaces import Namespaces
from tests.cluster.apparatus.training_job import TrainingJob, example

COMMAND_S = 240.0  # `stop` waits up to 180 s
PLUGIN = f"""#!/bin/sh
exec {sys.executable} -m holdfast "$@"
"""


def attempt(*words: str, config: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a holdfast command, with another kubeconfig if one is given."""
    environment = {**os.environ, **({"KUBECONFIG": str(config)} if config else {})}
    return subprocess.run(
        [sys.executable, "-m", "holdfast", *words],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=COMMAND_S,
    )


def holdfast(*words: str) -> str:
    """Return the output of a command that succeeds."""
    done = attempt(*words)
    assert done.returncode == 0, done.stderr or done.stdout
    return done.stdout


@pytest.fixture
def named(job: TrainingJob) -> tuple[str, str]:
    return "--job", f"{job.namespace}/gpt"


def test_a_job_is_listed_and_shown(job: TrainingJob, named: tuple[str, str]) -> None:
    rows = json.loads(holdfast("jobs", "-A", "--json"))
    [row] = [each for each in rows if each["namespace"] == job.namespace]
    assert (row["name"], row["kind"], row["members"], row["phase"]) == ("gpt", "StatefulSet", 2, "running")
    assert holdfast("status", *named).startswith(f"job {job.namespace}/gpt: running\n")
    status = json.loads(holdfast("status", *named, "--json"))
    assert status["alive"]
    assert len(status["ranks"]) == 2
    assert "the supervisor cannot read the job's storage" in holdfast("checkpoints", *named)


def test_a_drill_is_carried_out_and_explained(job: TrainingJob, named: tuple[str, str]) -> None:
    before = job.observe()
    assert "kill sent to rank 1 of job" in holdfast("inject", "kill", "--rank", "1", *named)
    job.recovered(before)
    incidents = json.loads(holdfast("incidents", *named, "--json"))
    assert incidents[-1]["kind"] == "crash"
    assert "rank 1 was killed by SIGKILL" in holdfast("explain", "last", *named)


@pytest.mark.parametrize(
    ("drill", "kind"), [("nan", "nan"), ("hang", "hang"), ("spin", "hang"), ("exit", "crash")]
)
def test_each_fault_is_found_and_named_as_in_a_local_run(
    job: TrainingJob, named: tuple[str, str], drill: str, kind: str
) -> None:
    before = job.observe()
    holdfast("inject", drill, "--rank", "1", *named)
    incident = job.recovered(before)
    assert (incident["kind"], incident["rank"]) == (kind, 1), incident["why"]
    after = job.observe()
    assert (after.pods, after.restarts) == (before.pods, before.restarts)
    if kind == "hang":
        ranks = {rank for group in incident["stacks"] for rank in group["ranks"]}
        assert ranks == {0, 1}, "the stacks of all ranks"
        assert "trainer/gpt/__main__.py" in holdfast("explain", "last", *named)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("kill", "--rank", "7"), "rank 7: this run has ranks 0 to 1"),
        (("supervisor",), "the supervisor of a cluster serves all of its jobs"),
    ],
)
def test_a_drill_is_refused_with_the_reason(
    named: tuple[str, str], words: tuple[str, ...], said: str
) -> None:
    done = attempt("inject", *words, *named)
    assert done.returncode == 2
    assert done.stderr.startswith(f"holdfast: inject was refused: {said}")


def test_a_mistyped_name_is_answered_with_the_nearest_existing_one(job: TrainingJob) -> None:
    done = attempt("status", "--job", "gtp", "-n", job.namespace)
    assert done.returncode == 2
    assert "did you mean 'gpt'? `holdfast jobs -A` lists all jobs" in done.stderr


def test_the_doctor_finds_nothing_in_a_job_that_trains_and_a_mistake_in_another_pod(
    job: TrainingJob, cluster: ClusterUnderTest, namespace: str
) -> None:
    assert holdfast("doctor", "-n", job.namespace).endswith("no problem found\n")
    assert "supervised as a member of job" in holdfast("doctor", "gpt-0", "-n", job.namespace)
    pod = example("bare-pods.yaml", annotations={"holdfast.dev/hang-flor": "5s"})[0]
    cluster.kubectl("create", "-n", namespace, "-f", "-", text=json.dumps(pod))
    done = attempt("doctor", "-n", namespace)
    assert done.returncode == 1
    assert "not injected: holdfast.dev/hang-flor: unknown annotation: did you mean" in done.stdout


def test_a_command_has_only_the_rights_of_its_user(
    job: TrainingJob, cluster: ClusterUnderTest, tmp_path: Path, named: tuple[str, str]
) -> None:
    there = ("-n", job.namespace)
    cluster.kubectl("create", "serviceaccount", "reader", *there)
    token = cluster.kubectl("create", "token", "reader", *there).strip()
    config = tmp_path / "config"
    raw = json.loads(cluster.kubectl("config", "view", "--raw", "--flatten", "-o", "json"))
    raw["users"] = [{"name": each["name"], "user": {"token": token}} for each in raw["users"]]
    config.write_text(json.dumps(raw))
    done = attempt("status", *named, config=config)
    assert done.returncode == 2
    assert (
        f"may not get supervisions in namespace '{job.namespace}'; the ClusterRole holdfast-view"
        in done.stderr
    )
    account = f"--serviceaccount={job.namespace}:reader"
    cluster.kubectl("create", "rolebinding", "reader", "--clusterrole=holdfast-view", account, *there)
    cluster.until(
        lambda: attempt("status", *named, config=config).returncode == 0 or None,
        "the right to look at the job",
        job.namespace,
        REQUEST_S,
    )
    done = attempt("stop", *named, config=config)
    assert done.returncode == 2
    assert "may not patch supervisions" in done.stderr
    assert "the ClusterRole holdfast-edit has that right" in done.stderr


def test_kubectl_finds_the_plugin(job: TrainingJob, tmp_path: Path) -> None:
    plugin = tmp_path / "kubectl-holdfast"
    plugin.write_text(PLUGIN)
    plugin.chmod(0o755)
    done = subprocess.run(
        ["kubectl", "holdfast", "jobs", "-n", job.namespace],
        cwd=ROOT,
        env={**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=COMMAND_S,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1].startswith("gpt   StatefulSet")


def test_a_job_is_stopped(installed: ClusterUnderTest, namespaces: Namespaces) -> None:
    job = TrainingJob(installed, namespaces.make(), example("job.yaml", "--steps=1000000", "--pace=0.05"))
    job.start()
    job.trains()
    lines = holdfast("stop", "--job", f"{job.namespace}/gpt").splitlines()
    assert lines[0] == f"stopping job {job.namespace}/gpt"
    [ended] = [line for line in lines if line.startswith("ended: ")]
    assert "without a checkpoint: the job has no storage for checkpoints" in ended
    assert any(line.endswith(f"kubectl -n {job.namespace} delete job/gpt") for line in lines)
    assert "reported no usable checkpoint" in holdfast("checkpoints", "--job", f"{job.namespace}/gpt")
    before = job.status()
    assert (before["phase"], before["exitCode"]) == ("ended", 130)
    assert before["step"] > 0

    def has_ended_again() -> bool | None:
        """Return True if the Job's controller has created more pods, and all pods have ended."""
        phases = [pod["status"]["phase"] for pod in job.pods()]
        return True if len(phases) > 2 and set(phases) == {"Failed"} else None

    job.until(has_ended_again, "the owner's next pods end too", COMMAND_S)
    shown = ("phase", "step", "ettr", "message", "exitCode")
    assert {name: job.status()[name] for name in shown} == {name: before[name] for name in shown}
    done = attempt("stop", "--job", f"{job.namespace}/gpt")
    assert done.returncode == 2
    assert "is not running" in done.stderr

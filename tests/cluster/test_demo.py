"""`holdfast demo --cluster` from a checkout: it installs, breaks, compares, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.cluster.apparatus.kubernetes_cluster import ROOT, SYSTEM, ClusterUnderTest, is_lent

DEMO_S = 300.0  # it takes a minute and a half; the limits within it are longer
WORDS = (sys.executable, "-m", "holdfast", "demo", "--cluster", "--quick")
KINDS = "namespaces,customresourcedefinitions,mutatingwebhookconfigurations,clusterroles,clusterrolebindings"


@pytest.fixture
def left(cluster: ClusterUnderTest, images: tuple[str, ...]) -> Iterator[set[str]]:
    """Yield the objects of Holdfast before the demo, and check that they are the same afterwards."""
    assert images
    before = ours(cluster)
    assert is_lent() or before == set(), "another test left a cluster that the demo would use"
    yield before
    assert ours(cluster) == before


def ours(cluster: ClusterUnderTest) -> set[str]:
    names = cluster.kubectl("get", KINDS, "-o", "name").split()
    return {name for name in names if "holdfast" in name}


def test_the_demo_recovers_from_its_faults_and_ends_with_equal_weights(left: set[str]) -> None:
    done = subprocess.run(WORDS, cwd=ROOT, capture_output=True, text=True, check=False, timeout=DEMO_S)
    assert done.returncode == 0, done.stdout + done.stderr
    table = re.findall(r"^  i-000\d +(\w+) ", done.stdout, re.MULTILINE)
    assert table == ["crash", "nan", "member_lost"], done.stdout
    assert done.stdout.count("no pod and no container was restarted") == 2
    assert re.search(
        r"pod gpt-1-\w+ was replaced by gpt-1-\w+; its owner created it after \d+ s", done.stdout
    )
    digests = re.findall(r"[0-9a-f]{40}", done.stdout)
    assert len(digests) == 2
    assert digests[0] == digests[1]
    assert "everything was removed" in done.stdout


def test_the_demo_removes_everything_when_it_is_interrupted(
    left: set[str], cluster: ClusterUnderTest
) -> None:
    """An impatient user interrupts it twice, at the moment when most objects exist."""
    with subprocess.Popen(
        WORDS, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as demo:
        try:
            there = cluster.until(lambda: ours_of_a_demo(cluster), "the demo has a namespace", SYSTEM, DEMO_S)
            assert not there <= left
            os.kill(demo.pid, signal.SIGINT)
            os.kill(demo.pid, signal.SIGINT)
            out, _ = demo.communicate(timeout=DEMO_S)
        finally:
            demo.kill()
    assert demo.returncode == 130, out
    assert "Removing everything that the demo created" in out
    assert "Traceback" not in out


def ours_of_a_demo(cluster: ClusterUnderTest) -> set[str] | None:
    return set(cluster.kubectl("get", "namespaces", "-l", "holdfast.dev/demo", "-o", "name").split()) or None

"""A cluster in which Holdfast is installed, and a kubectl, for the tests of what a bench does without one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import __main__ as program
from bench.harness import results
from tests.unit.supervisor.cli.on_cluster.stand_in import CONFIG, ApiStandIn, standing_in

SYSTEM = "/apis/apps/v1/namespaces/holdfast-system/deployments"
WEBHOOK = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/holdfast-webhook"

# Lists the pods of a job. No pod has begun to train yet.
KUBECTL = """#!/bin/sh
printf '%s\\n' "$*" >> "$0.called"
case "$*" in
  *"get pods"*) cat "$0.pods";;
  *" exec "*) exit 1;;
esac
"""


@pytest.fixture(autouse=True)
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a kubectl that records its arguments first on PATH, and results into a temporary folder."""
    made = tmp_path / "bin" / "kubectl"
    made.parent.mkdir()
    made.write_text(KUBECTL)
    made.chmod(0o755)
    monkeypatch.setenv("PATH", f"{made.parent}:/usr/bin:/bin")
    monkeypatch.setattr(results, "FOLDER", tmp_path / "results")
    monkeypatch.setattr(program, "_ENDING", ())  # leaves pytest's own handlers of signals in place
    return made


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiStandIn]:
    """Yield the API server of KUBECONFIG, in which Holdfast is installed and ready."""
    with standing_in() as made:
        (tmp_path / "config").write_text(CONFIG % made.url)
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
        made.put(WEBHOOK, {"webhooks": [{"clientConfig": {"caBundle": "Q0E="}}]})
        for name in ("holdfast-webhook", "holdfast-supervisor"):
            made.put(f"{SYSTEM}/{name}", {"spec": {"replicas": 1}, "status": {"readyReplicas": 1}})
        yield made

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.supervisor.cli.on_cluster.stand_in import CONFIG, ApiStandIn, standing_in


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiStandIn]:
    """Yield an API server that the kubeconfig points to."""
    with standing_in() as made:
        (tmp_path / "config").write_text(CONFIG % made.url)
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
        yield made


@pytest.fixture
def nothing_configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)

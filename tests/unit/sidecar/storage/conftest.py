"""Two S3 servers: ours, which fails on request, and moto's, if it is installed beside the project."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast.checkpoint import object_location
from sidecar.storage.object_client import ObjectClient, RequestLimits
from sidecar.storage.object_storage import ObjectStorage
from tests.s3server.server import ObjectServer, credentials, serving

MOTO = Path(os.environ.get("HOLDFAST_MOTO", f"{sys.prefix}/moto/bin/moto_server"))
QUICK = RequestLimits(
    connect_s=5.0,
    answer_s=5.0,
    write_s=10.0,
    read_s=10.0,
    stall_s=1.0,
    retry_s=3.0,
    retries=3,
    first_pause_s=0.01,
    longest_pause_s=0.05,
)
LOCATION = object_location.parse("s3://checkpoints/runs/gpt")


@contextmanager
def variables(given: dict[str, str]) -> Iterator[None]:
    """Set the credentials, which the library reads from the environment, and no others."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [each for each in os.environ if each.startswith(("AWS_", "GOOGLE_", "AZURE_"))]:
            patch.delenv(name)
        for name, value in given.items():
            patch.setenv(name, value)
        yield


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ObjectServer]:
    with serving(tmp_path / "objects") as made, variables(credentials(made.url)):
        yield made


def storage_at(
    url: str, local: Path, limits: RequestLimits = QUICK, location: object_location.ObjectLocation = LOCATION
) -> ObjectStorage:
    with variables(credentials(url)):  # not at its first use, because other threads read the environment
        client = ObjectClient(location, credentials(url), limits)
    return ObjectStorage(location, lambda: client, local)


@pytest.fixture
def storage(server: ObjectServer, tmp_path: Path) -> ObjectStorage:
    return storage_at(server.url, tmp_path / "copies")


@pytest.fixture(scope="session")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the URL of moto's server with a bucket."""
    if not MOTO.exists():
        pytest.skip("moto is not installed: make moto")
    with subprocess.Popen(
        [MOTO, "-H", "127.0.0.1", "-p", "0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        try:
            port = next(
                match[1]
                for line in process.stdout
                if (match := re.search(r"Running on http://127\.0\.0\.1:(\d+)", line))
            )
            threading.Thread(target=process.stdout.read, daemon=True).start()  # it logs every request
            url = f"http://127.0.0.1:{port}"
            urllib.request.urlopen(urllib.request.Request(f"{url}/checkpoints", method="PUT")).close()
            yield url
        finally:
            process.kill()


@pytest.fixture(params=["ours", "moto"])
def any_url(request: pytest.FixtureRequest) -> str:
    """Return the URL of each kind of server. Its bucket `checkpoints` is empty at first."""
    if request.param == "moto":
        url: str = request.getfixturevalue("moto")
        urllib.request.urlopen(urllib.request.Request(f"{url}/moto-api/reset", method="POST")).close()
        urllib.request.urlopen(urllib.request.Request(f"{url}/checkpoints", method="PUT")).close()
        return url
    served: ObjectServer = request.getfixturevalue("server")
    return served.url

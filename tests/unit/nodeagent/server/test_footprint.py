from __future__ import annotations

import json
import mimetypes
import os
import subprocess
import sys

import pytest

from holdfast import parts
from nodeagent.server import footprint

# What an agent at rest does not need. psutil and the journal's sensor are used only on some nodes, the others
# only for messages about mistakes.
UNUSED = ("difflib", "encodings.idna", "nodeagent.kernel.journal", "nodeagent.publishing.publisher", "psutil")
_IMPORTED = """
import json, sys
from nodeagent.cli import commands
from nodeagent.server import footprint
footprint.share_heap()
with footprint.without_unused_tables():
    from nodeagent.server import http_api
from aiohttp import connector
from nodeagent.server import listening
listening.listen("127.0.0.1", 0)[0].close()
print(json.dumps([sorted(sys.modules), len(connector._SSL_CONTEXT_VERIFIED.get_ca_certs())]))
"""


def test_a_serving_agent_imports_neither_unused_modules_nor_the_systems_certificate_authorities() -> None:
    environment = {**os.environ, "PYTHONPATH": str(parts.folder())}
    found = subprocess.run(
        [sys.executable, "-c", _IMPORTED], check=True, capture_output=True, env=environment, timeout=60
    )
    modules, authorities = json.loads(found.stdout)
    assert set(modules).isdisjoint(UNUSED)
    assert authorities == 0


@pytest.mark.parametrize("path", [None, "/etc/ssl/own.pem"])
def test_the_environment_and_the_table_of_files_are_as_before_after_the_imports(
    monkeypatch: pytest.MonkeyPatch, path: str | None
) -> None:
    monkeypatch.delenv("SSL_CERT_DIR", raising=False)
    if path is None:
        monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    else:
        monkeypatch.setenv("SSL_CERT_FILE", path)
    before, files = dict(os.environ), list(mimetypes.knownfiles)
    with footprint.without_unused_tables():
        assert os.environ["SSL_CERT_FILE"] == os.devnull
        assert mimetypes.knownfiles == []
    assert (dict(os.environ), mimetypes.knownfiles) == (before, files)

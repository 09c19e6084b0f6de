"""Members talk to each other over TLS, with a certificate that is created for the test."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from holdfast.protocol.member_messages import StateSource
from holdfast.snapshot import arena as arenas
from holdfast.snapshot.commit_records import CommitRecord
from sidecar.state import peers, snapshot_fetch, snapshot_send
from sidecar.state.snapshot_fetch import FetchFailed
from tests.unit.sidecar.fake_peer import fetching, serving
from tests.unit.sidecar.memory import holdings, member, private, snapshot

CHUNK_BYTES = 64 << 10
SIZE = 20 * CHUNK_BYTES + 12_345

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="the certificate is made by openssl")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file with a key and a certificate for 127.0.0.1 that is signed with it."""
    folder = tmp_path_factory.mktemp("certificate")
    key, made = folder / "key.pem", folder / "made.pem"
    words = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=member"
    )
    words += f" -addext subjectAltName=IP:127.0.0.1 -keyout {key} -out {made}"
    subprocess.run(words.split(), check=True, capture_output=True)
    both = folder / "both.pem"
    both.write_text(key.read_text() + made.read_text())
    return both


@pytest.fixture
def server(certificate: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    return context


@pytest.fixture
def client(certificate: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(certificate))


@pytest.fixture
def folders(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, ...]]:
    for module in (snapshot_fetch, snapshot_send, arenas):
        monkeypatch.setattr(module, "CHUNK_BYTES", CHUNK_BYTES)
    monkeypatch.setattr(snapshot_fetch, "LEAST_BYTES", 2 * CHUNK_BYTES)
    monkeypatch.setattr(peers, "PIECE_BYTES", 40_000)
    with ExitStack() as stack:
        yield tuple(stack.enter_context(member()) for _ in range(3))


def same(one: CommitRecord, other: CommitRecord) -> bool:
    return one.path.read_bytes() == other.path.read_bytes()


@pytest.mark.parametrize("sealed", [True, False])
async def test_a_snapshot_transferred_over_tls_is_bit_for_bit_equal(
    folders: tuple[Path, ...], server: ssl.SSLContext, client: ssl.SSLContext, sealed: bool
) -> None:
    here, *there = folders
    held = [snapshot(path, 2, 7, size=SIZE) for path in there]
    if sealed:
        for path, record in zip(there, held, strict=True):
            holdings(path).arena.seal(record)
    private(there[0], 1, 2, 7, b"x" * 300_000)
    async with (
        serving(there[0], tls=server) as one,
        serving(there[1], tls=server) as other,
        fetching(here, tls=client) as fetcher,
    ):
        found = await fetcher.snapshot(StateSource(one, -1, 2, 7), StateSource(other, -1, 2, 7))
        assert same(found, held[0])
        assert await fetcher.private(StateSource(one, 1, 2, 7)) == b"x" * 300_000


async def test_no_plain_text_is_sent_with_tls(
    folders: tuple[Path, ...], server: ssl.SSLContext, client: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    def poured(*_: object) -> None:
        raise AssertionError("a thread writes to the socket of a connection that is encrypted")

    monkeypatch.setattr(snapshot_send, "send_range", poured)
    here, there, _ = folders
    held = snapshot(there, 2, 7, size=SIZE)
    async with serving(there, tls=server) as url, fetching(here, tls=client) as fetcher:
        assert same(await fetcher.snapshot(StateSource(url, -1, 2, 7)), held)


async def test_a_peer_with_an_unknown_certificate_is_refused(
    folders: tuple[Path, ...], server: ssl.SSLContext
) -> None:
    here, there, _ = folders
    snapshot(there, 2, 7)
    private(there, 1, 2, 7)
    async with serving(there, tls=server) as url, fetching(here) as fetcher:
        with pytest.raises(FetchFailed, match="CERTIFICATE_VERIFY_FAILED"):
            await fetcher.snapshot(StateSource(url, -1, 2, 7))
        with pytest.raises(FetchFailed, match="CERTIFICATE_VERIFY_FAILED"):
            await fetcher.private(StateSource(url, 1, 2, 7))
    assert holdings(here).slots() == ()


async def test_a_peer_without_tls_is_refused(folders: tuple[Path, ...], client: ssl.SSLContext) -> None:
    here, there, _ = folders
    snapshot(there, 2, 7)
    async with serving(there) as url, fetching(here, tls=client) as fetcher:
        with pytest.raises(FetchFailed):
            await fetcher.snapshot(StateSource(url.replace("http:", "https:"), -1, 2, 7))

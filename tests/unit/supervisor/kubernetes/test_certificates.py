"""One authority for all replicas, certificates that clients accept, and renewals without interruption."""

from __future__ import annotations

import asyncio
import base64
import itertools
import ssl
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer
from cryptography import x509
from hypothesis import given
from hypothesis import strategies as st

from supervisor.kubernetes import certificates
from supervisor.kubernetes.certificates import (
    Authority,
    AuthoritySecret,
    BrokenAuthority,
    ServerCertificate,
    bundle,
    decode,
    encode,
    new_authority,
    renewed,
    server_certificate,
    signer,
)
from tests.unit.supervisor.kubernetes.object_store import LOST_ANSWER, Line, ObjectStore
from tests.unit.supervisor.kubernetes.simulated_time import simulated

NAMES = ("holdfast-webhook.holdfast-system.svc", "holdfast-webhook")
NOW = datetime.now(timezone.utc).replace(microsecond=0)
DAY = timedelta(days=1)


class Wall:
    def __init__(self, now: datetime = NOW) -> None:
        self.now = now

    def __call__(self) -> datetime:
        return self.now


def secret(store: ObjectStore, wall: Wall | None = None) -> AuthoritySecret:
    return AuthoritySecret(store, "ns", now=wall or Wall())


def stored(store: ObjectStore) -> dict[str, str]:
    found: dict[str, str] = store.objects["secrets", "ns", "holdfast-ca"]["data"]
    return found


# -- authorities


@simulated
async def test_the_first_replica_creates_the_authority_and_the_others_read_it() -> None:
    store = ObjectStore()
    texts = {bundle(await secret(store).load()) for _ in range(3)}
    assert len(texts) == 1
    assert store.writes == [("create", "holdfast-ca")]
    assert base64.b64decode(stored(store)["ca.crt"]).decode() in texts


@simulated
async def test_racing_replicas_agree_on_one_authority() -> None:
    store = ObjectStore()
    store.faults = [0.1] * 8  # all of them find no Secret, and then all create one
    found = await asyncio.gather(*(secret(store).load() for _ in range(8)))
    assert len({bundle(each) for each in found}) == 1


@simulated
async def test_replicas_that_race_to_add_a_successor_agree() -> None:
    store, wall = ObjectStore(), Wall()
    await secret(store, wall).load()
    wall.now += 2000 * DAY
    store.faults = [0.1] * 8
    found = await asyncio.gather(*(secret(store, wall).load() for _ in range(8)))
    assert len({bundle(each) for each in found}) == 1
    assert len(found[0]) == 2


@simulated
async def test_a_creation_whose_answer_was_lost_is_found_the_next_time() -> None:
    store = ObjectStore()
    store.faults = [None, LOST_ANSWER]
    with pytest.raises(OSError, match="connection reset"):
        await secret(store).load()
    await secret(store).load()
    assert store.writes == [("create", "holdfast-ca")]


@given(st.lists(st.integers(1, 900), max_size=30))
def test_a_client_with_an_old_bundle_accepts_the_signer_for_years(waits: list[int]) -> None:
    """However rarely replicas look, every bundle of the last four years contains the current signer."""
    now = NOW
    authorities: tuple[Authority, ...] = ()
    bundles: list[tuple[datetime, str]] = []
    for days in waits:
        now += days * DAY
        authorities = renewed(authorities, now)
        signs = signer(authorities, now)
        assert signs.ends - now >= certificates.SIGN_DAYS * DAY
        assert all(signs.text in text for made, text in bundles if now - made < 4 * 365 * DAY)
        assert len(authorities) <= 3
        bundles.append((now, bundle(authorities)))


def test_a_successor_is_added_long_before_it_signs_and_the_old_one_is_removed_at_its_end() -> None:
    first = renewed((), NOW)
    assert renewed(first, NOW + 1000 * DAY) == first
    both = renewed(first, NOW + 2000 * DAY)
    assert both[0] is first[0]
    assert len(both) == 2
    assert signer(both, NOW + 3400 * DAY) is both[0]
    assert signer(both, NOW + 3500 * DAY) is both[1]
    assert renewed(both, NOW + 3651 * DAY) == both[1:]


def test_authorities_are_preserved_by_the_secret() -> None:
    made = (new_authority(NOW), new_authority(NOW + DAY))
    again = decode(encode(made))
    assert bundle(again) == bundle(made)
    assert [each.ends for each in again] == [each.ends for each in made]
    assert renewed(again, NOW) == again  # so nothing needs to be written


def test_the_order_in_the_secret_does_not_matter() -> None:
    one, two = new_authority(NOW), new_authority(NOW + DAY)
    data = {"ca.crt": encode([two, one])["ca.crt"], "ca.key": encode([one, two])["ca.key"]}
    assert bundle(decode(data)) == bundle([one, two])


@pytest.mark.parametrize(
    "data",
    [
        None,
        {},
        {"ca.crt": "", "ca.key": ""},
        {"ca.crt": "%%%", "ca.key": ""},
        {**encode([new_authority(NOW)]), "ca.key": encode([new_authority(NOW)])["ca.key"]},
        {**encode([new_authority(NOW)]), "ca.key": base64.b64encode(b"no key").decode()},
        {**encode([new_authority(NOW)]), "ca.crt": base64.b64encode(b"no certificate").decode()},
    ],
)
def test_a_foreign_secret_is_reported_and_not_overwritten(data: object) -> None:
    with pytest.raises(BrokenAuthority, match="Delete it, and a new one is created"):
        decode(data)


def test_no_private_key_is_in_any_repr() -> None:
    authority = new_authority(NOW)
    leaf = certificates.new_leaf(authority, NAMES, (), NOW)
    keys = encode([authority])["ca.key"], leaf.chain.decode()
    for shown in (repr(authority), repr(leaf), str(authority), f"{leaf}"):
        assert "PRIVATE" not in shown
        assert not any(key[60:100] in shown for key in keys)


# -- servers


class Connection:
    """A TLS connection in memory. Raises what the client raises if it does not accept the certificate."""

    def __init__(self, server: ssl.SSLContext, text: str, name: str) -> None:
        context = ssl.create_default_context(cadata=text)
        context.verify_flags |= ssl.VERIFY_X509_STRICT  # as Python 3.13 does
        there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.client = context.wrap_bio(back, there, server_hostname=name)
        self.server = server.wrap_bio(there, back, server_side=True)
        for end in (self.client, self.server, self.client, self.server):
            with suppress(ssl.SSLWantReadError):
                end.do_handshake()

    @property
    def certificate(self) -> x509.Certificate:
        found = self.client.getpeercert(binary_form=True)
        assert found is not None
        return x509.load_der_x509_certificate(found)

    def send(self, text: bytes) -> bytes:
        self.server.write(text)
        return self.client.read(100)


@simulated
async def test_clients_accept_each_name_and_address_and_no_other() -> None:
    made = await server_certificate(secret(ObjectStore()), NAMES, ["127.0.0.1", "fd00::1"])
    for name in (*NAMES, "127.0.0.1", "fd00::1"):
        assert Connection(made.context, made.bundle, name).send(b"hello") == b"hello"
    with pytest.raises(ssl.SSLCertVerificationError):
        Connection(made.context, made.bundle, "kubernetes.default.svc")
    with pytest.raises(ssl.SSLCertVerificationError):
        Connection(made.context, bundle([new_authority(NOW)]), NAMES[0])


@simulated
async def test_every_replica_is_accepted_with_the_same_bundle() -> None:
    store = ObjectStore()
    one, two = [await server_certificate(secret(store), NAMES) for _ in range(2)]
    for each in (one, two):
        Connection(each.context, one.bundle, NAMES[0])


@simulated
async def test_a_renewal_does_not_affect_open_connections() -> None:
    wall = Wall(NOW - 10 * DAY)
    made = await server_certificate(secret(ObjectStore(), wall), NAMES)
    before = Connection(made.context, made.bundle, NAMES[0])
    wall.now += 8 * DAY
    await made.check()
    after = Connection(made.context, made.bundle, NAMES[0])
    assert before.send(b"still there") == b"still there"
    assert after.certificate.serial_number != before.certificate.serial_number
    assert after.certificate.not_valid_after_utc - before.certificate.not_valid_after_utc == 8 * DAY


async def test_a_renewal_leaves_the_listening_socket_open() -> None:
    wall = Wall(NOW - 10 * DAY)
    made = await server_certificate(secret(ObjectStore(), wall), ["x"], ["127.0.0.1"])

    async def answer(request: web.Request) -> web.Response:
        assert request.transport is not None
        return web.Response(text=str(request.transport.get_extra_info("peername")))

    app = web.Application()
    app.router.add_get("/", answer)
    server = TestServer(app, scheme="https")
    await server.start_server(ssl=made.context)
    tls = ssl.create_default_context(cadata=made.bundle)
    served: list[str] = []
    try:
        async with ClientSession() as session, ClientSession() as later:
            for each in (session, session, later):
                async with each.get(server.make_url("/"), ssl=tls) as response:
                    served.append(await response.text())
                wall.now += 4 * DAY
                await made.check()
    finally:
        await server.close()
    assert served[0] == served[1] != served[2]  # the first two over one connection


@simulated
async def test_a_new_authority_in_the_secret_is_adopted() -> None:
    """After a leak, somebody has deleted the Secret, and another replica was the first to notice."""
    store = ObjectStore()
    changes: list[str] = []
    made = await server_certificate(secret(store), NAMES, bundle_changed=changes.append)
    store.objects.clear()
    other = await server_certificate(secret(store), NAMES)
    await made.check()
    assert made.bundle == other.bundle
    assert changes == [changes[0], other.bundle]
    Connection(made.context, other.bundle, NAMES[0])
    with pytest.raises(ssl.SSLCertVerificationError):
        Connection(made.context, changes[0], NAMES[0])


@simulated
async def test_no_key_is_left_in_an_open_file() -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        await server_certificate(secret(ObjectStore()), NAMES)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@simulated
async def test_a_certificate_never_expires_even_if_the_server_is_away_for_days_at_a_time() -> None:
    store, wall = ObjectStore(), Wall()
    changes: list[str] = []
    line = Line(store)
    made = ServerCertificate(AuthoritySecret(line, "ns", now=wall), NAMES, bundle_changed=changes.append)
    await made.check()
    running = asyncio.ensure_future(made.run())
    for day in range(60):
        line.cut = day % 7 > 0
        await asyncio.sleep(7200)
        wall.now += DAY
        assert made._leaf is not None
        assert made._leaf.ends > wall.now
    running.cancel()
    assert len(changes) == 1
    assert not running.done()


@simulated
async def test_a_broken_secret_does_not_end_a_running_server() -> None:
    store = ObjectStore()
    made = await server_certificate(secret(store), NAMES)
    running = asyncio.ensure_future(made.run())
    store.objects["secrets", "ns", "holdfast-ca"]["data"] = {}
    await asyncio.sleep(7300)
    assert not running.done()
    del store.objects["secrets", "ns", "holdfast-ca"]
    await asyncio.sleep(7300)
    assert stored(store)
    running.cancel()


def test_the_limits_of_certificates_are_in_ascending_order() -> None:
    days = (
        certificates.RENEW_DAYS,
        certificates.LEAF_DAYS,
        certificates.SIGN_DAYS,
        certificates.JOIN_DAYS,
        certificates.AUTHORITY_DAYS,
    )
    assert all(one < two for one, two in itertools.pairwise(days))

"""Manage Holdfast's certificate authority, kept in a Secret, and issue server certificates.

Clients verify Holdfast's servers against a bundle of authorities. A pod receives the bundle when it is
created, and keeps it for its whole life. An authority is therefore valid for years. Its successor joins the
bundle `JOIN_DAYS` before the authority expires, but signs certificates only in the authority's last
`SIGN_DAYS`. A pod that lives for less than `JOIN_DAYS` minus `SIGN_DAYS` can therefore verify every
certificate that it is shown.

The Secret's `ca.crt` contains the certificates and its `ca.key` the private keys, with the oldest authority
first. To replace a leaked key, delete the Secret: the next check creates a new authority. Existing pods keep
their old bundle, so their sidecars can no longer connect, and they train unsupervised until they are
replaced.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import ipaddress
import logging
import os
import ssl
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import NoReturn, Protocol

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from supervisor.kubernetes.client import KubernetesObject, ResourceKind
from supervisor.kubernetes.errors import AlreadyThere, ApiError, Conflict, NotFound

log = logging.getLogger(__name__)

SECRETS = ResourceKind("", "v1", "secrets")
AUTHORITY_SECRET = "holdfast-ca"
AUTHORITY_DAYS = 3650
JOIN_DAYS = 1825
SIGN_DAYS = 180
LEAF_DAYS = 14.0
RENEW_DAYS = 7.0  # a leaf is renewed this long before it expires, in case the API server is unreachable
CHECK_S = 3600.0  # the time between checks of the Secret, because another replica may add an authority
RETRY_S = 60.0
BACKDATED = timedelta(hours=1)  # for hosts whose clocks are behind
_DAY = timedelta(days=1)
_PEM = serialization.Encoding.PEM


class BrokenAuthority(Exception):
    """The Secret contains no valid authority. The message says why, and suggests deleting the Secret."""


@dataclass(frozen=True, slots=True)
class Authority:
    """One certificate authority. Its repr does not contain the private key."""

    certificate: x509.Certificate = field(repr=False)
    key: ec.EllipticCurvePrivateKey = field(repr=False)
    ends: datetime

    @property
    def text(self) -> str:
        return self.certificate.public_bytes(_PEM).decode()


@dataclass(frozen=True, slots=True)
class Leaf:
    """A server's certificate, its private key, and the authority that signed it."""

    chain: bytes = field(repr=False)  # PEM: private key and certificate
    ends: datetime
    signer: Authority


class SecretStore(Protocol):
    """The methods of `ApiServer` that `AuthoritySecret` needs."""

    async def get(self, kind: ResourceKind, name: str, namespace: str = "") -> KubernetesObject: ...

    async def create(
        self, kind: ResourceKind, body: KubernetesObject, namespace: str = ""
    ) -> KubernetesObject: ...

    async def replace(self, kind: ResourceKind, body: KubernetesObject) -> KubernetesObject: ...


def _utc_now() -> datetime:
    return datetime.now(timezone.utc)


# -- authorities


def new_authority(now: datetime) -> Authority:
    key = ec.generate_private_key(ec.SECP256R1())
    # The name must be unique, because clients find the signer by name.
    common = f"Holdfast authority {now:%Y-%m-%d} {uuid.uuid4().hex[:8]}"
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])
    ends = now + AUTHORITY_DAYS * _DAY
    builder = (
        _builder(name, name, key.public_key(), now, ends)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
    )
    return Authority(builder.sign(key, hashes.SHA256()), key, ends)


def renewed(authorities: Sequence[Authority], now: datetime) -> tuple[Authority, ...]:
    """Return the authorities that have not expired, plus a new one if the newest of them expires soon."""
    left = [each for each in authorities if each.ends > now]
    if not left or left[-1].ends - now < JOIN_DAYS * _DAY:
        left.append(new_authority(now))
    return tuple(left)


def signer(authorities: Sequence[Authority], now: datetime) -> Authority:
    """Return the oldest authority that remains valid for `SIGN_DAYS`; the newest one if none does."""
    lasting = [each for each in authorities if each.ends - now >= SIGN_DAYS * _DAY]
    return lasting[0] if lasting else authorities[-1]


def bundle(authorities: Sequence[Authority]) -> str:
    """Return the PEM text of all authorities' certificates. Clients verify servers with it."""
    return "".join(each.text for each in authorities)


def encode(authorities: Sequence[Authority]) -> dict[str, str]:
    """Return the data of the Secret."""
    keys = b"".join(_private(each.key) for each in authorities)
    contents = {"ca.crt": bundle(authorities).encode(), "ca.key": keys}
    return {name: base64.b64encode(content).decode() for name, content in contents.items()}


def decode(data: object) -> tuple[Authority, ...]:
    """Return the authorities in the data of the Secret. Raises `BrokenAuthority`."""
    try:
        if not isinstance(data, dict):
            raise ValueError("it has no data")
        certificates = x509.load_pem_x509_certificates(base64.b64decode(data["ca.crt"]))
        keys = [_load_key(each) for each in _split_keys(base64.b64decode(data["ca.key"]))]
        by_public = {_public(each.public_key()): each for each in keys}
        found = [Authority(each, by_public[_public(each.public_key())], _end(each)) for each in certificates]
        if not found:
            raise ValueError("it has no certificate")
    except KeyError:
        raise BrokenAuthority(
            _BROKEN.format("it lacks ca.crt, ca.key, or the key of a certificate")
        ) from None
    except (ValueError, TypeError, binascii.Error) as error:
        raise BrokenAuthority(_BROKEN.format(error)) from None
    return tuple(sorted(found, key=lambda each: each.ends))


class AuthoritySecret:
    """Reads and writes the Secret with the authorities, which all replicas share."""

    def __init__(
        self,
        server: SecretStore,
        namespace: str,
        name: str = AUTHORITY_SECRET,
        now: Callable[[], datetime] = _utc_now,
    ) -> None:
        self._server, self._namespace, self._name = server, namespace, name
        self.now = now

    async def load(self) -> tuple[Authority, ...]:
        """Return the authorities in the Secret. If necessary, create it or add a successor.

        Replicas that do this at the same time get the same authorities. Safe to repeat.

        Raises:
            BrokenAuthority: The Secret contains no valid authority.
            ApiError, ServerUnreachable: A request failed.
        """
        for _ in range(_REPLICAS):
            try:
                return await self._agree()
            except (AlreadyThere, Conflict, NotFound):  # another replica was faster; read what it wrote
                continue
        return await self._agree()

    async def _agree(self) -> tuple[Authority, ...]:
        try:
            secret = await self._server.get(SECRETS, self._name, self._namespace)
        except NotFound:
            return await self._create()
        known = decode(secret.get("data"))
        wanted = renewed(known, self.now())
        if wanted != known:
            await self._server.replace(SECRETS, {**secret, "data": encode(wanted)})
            log.info("authority added", extra={"ends": wanted[-1].ends.isoformat()})
        return wanted

    async def _create(self) -> tuple[Authority, ...]:
        made = renewed((), self.now())
        metadata = {"name": self._name, "namespace": self._namespace}
        body = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": metadata,
            "type": "Opaque",
            "data": encode(made),
        }
        await self._server.create(SECRETS, body, self._namespace)
        log.info("authority created", extra={"ends": made[-1].ends.isoformat()})
        return made


# -- servers' certificates


def new_leaf(authority: Authority, names: Sequence[str], addresses: Sequence[str], now: datetime) -> Leaf:
    """Return a certificate for a server with these DNS names and IP addresses, signed by `authority`."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0][:64])])
    alternatives = [x509.DNSName(each) for each in names]
    at = [x509.IPAddress(ipaddress.ip_address(each)) for each in addresses]
    ends = min(now + LEAF_DAYS * _DAY, authority.ends)
    certificate = (
        _builder(subject, authority.certificate.subject, key.public_key(), now, ends)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName([*alternatives, *at]), critical=False)
        .add_extension(_issuer_key(authority), critical=False)
        .sign(authority.key, hashes.SHA256())
    )
    return Leaf(_private(key) + certificate.public_bytes(_PEM), ends, authority)


class ServerCertificate:
    """Keeps the certificate of a server's TLS `context` valid.

    The certificate is renewed in place, so the listening socket stays open. `bundle` is the PEM text that
    clients need. `bundle_changed` is called with the first bundle and after each change, and must not raise.
    """

    def __init__(
        self,
        secret: AuthoritySecret,
        names: Sequence[str],
        addresses: Sequence[str] = (),
        bundle_changed: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_3  # all clients support it
        self.bundle = ""
        self._secret, self._names, self._addresses = secret, names, addresses
        self._bundle_changed = bundle_changed
        self._leaf: Leaf | None = None

    async def check(self) -> None:
        """Read the Secret, and renew the certificate if it expires soon or its signer has changed.

        `context` cannot serve before the first successful call. Raises the exceptions of
        `AuthoritySecret.load`.
        """
        authorities = await self._secret.load()
        now = self._secret.now()
        signs = signer(authorities, now)
        leaf = self._leaf
        if leaf is None or leaf.signer.text != signs.text or leaf.ends - now <= RENEW_DAYS * _DAY:
            self._leaf = new_leaf(signs, self._names, self._addresses, now)
            _load_chain(self.context, self._leaf.chain)
            log.info("certificate issued", extra={"ends": self._leaf.ends.isoformat()})
        text = bundle(authorities)
        if text != self.bundle:
            self.bundle = text
            self._bundle_changed(text)

    async def run(self) -> NoReturn:
        """Check at intervals. While the API server is unreachable, keep the certificate. Never returns."""
        while True:
            try:
                await self.check()
                delay_s = CHECK_S
            except (ApiError, OSError, BrokenAuthority) as error:
                log.error("certificate not checked", extra={"error": str(error)})
                delay_s = RETRY_S
            await asyncio.sleep(delay_s)


async def server_certificate(
    secret: AuthoritySecret,
    names: Sequence[str],
    addresses: Sequence[str] = (),
    bundle_changed: Callable[[str], None] = lambda text: None,
) -> ServerCertificate:
    """Return a certificate that is ready to serve; its `run` renews it. Raises the exceptions of `check`."""
    made = ServerCertificate(secret, names, addresses, bundle_changed)
    await made.check()
    return made


_REPLICAS = 5  # the number of attempts to write the Secret, because another replica may write it first
_BROKEN = "the Secret of the certificate authority is unusable: {}. Delete it, and a new one is created"


def _load_chain(context: ssl.SSLContext, chain: bytes) -> None:
    """Use `chain` for new connections. OpenSSL can read it only from a file, so use a file in memory."""
    descriptor = os.memfd_create("certificate", os.MFD_CLOEXEC)
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(chain)
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, now: datetime, ends: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATED)
        .not_valid_after(ends)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _issuer_key(authority: Authority) -> x509.AuthorityKeyIdentifier:
    return x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key())


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())


def _public(key: object) -> bytes:
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ValueError("a key is not of an elliptic curve")
    return key.public_bytes(_PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def _split_keys(text: bytes) -> list[bytes]:
    end = b"-----END PRIVATE KEY-----\n"
    return [each + end for each in text.split(end) if each.strip()]


def _load_key(text: bytes) -> ec.EllipticCurvePrivateKey:
    key = serialization.load_pem_private_key(text, password=None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError("a key is not of an elliptic curve")
    return key


def _end(certificate: x509.Certificate) -> datetime:
    return certificate.not_valid_after_utc

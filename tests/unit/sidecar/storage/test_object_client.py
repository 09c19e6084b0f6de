"""Errors of object storage are retried or reported, and no message contains a secret."""

from __future__ import annotations

import os
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

import pytest

from holdfast.checkpoint import object_location
from holdfast.protocol import environment
from sidecar.storage.object_client import ObjectClient, ObjectStoreError, RequestLimits
from supervisor.kubernetes.certificates import Authority, bundle, new_authority, new_leaf
from tests.s3server.server import (
    ACCESS_KEY,
    SECRET_KEY,
    Cut,
    Fault,
    ObjectServer,
    Refusal,
    Request,
    credentials,
    serving,
)
from tests.unit.sidecar.storage.checkpoints import STATE, save, steps
from tests.unit.sidecar.storage.conftest import LOCATION, QUICK, storage_at, variables

ANSWER_S = 0.3
HASTY = RequestLimits(
    connect_s=2.0,
    answer_s=ANSWER_S,
    write_s=ANSWER_S,
    read_s=ANSWER_S,
    stall_s=ANSWER_S,
    retry_s=0.5,
    retries=1,
)


def client(url: str, limits: RequestLimits = QUICK, certificates: str = "", **more: str) -> ObjectClient:
    given = {**credentials(url), **more, environment.OBJECTS_CA: certificates}
    with variables(given):
        return ObjectClient(LOCATION, given, limits)


def failure(made: ObjectClient) -> ObjectStoreError:
    """Return the error of a listing. Check that it has no secret and only one line."""
    with pytest.raises(ObjectStoreError) as caught:
        list(made.objects("runs/gpt", 10))
    said = str(caught.value)
    assert SECRET_KEY not in said
    assert ACCESS_KEY not in said
    assert "\n" not in said
    assert said.startswith("s3://checkpoints/runs/gpt: list: ")
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__, "a traceback would show the library's text"
    return caught.value


@pytest.mark.parametrize(
    ("refusal", "why", "transient"),
    [
        (Refusal(403, "AccessDenied"), "the credentials do not permit the request (AccessDenied)", False),
        (Refusal(400, "ExpiredToken"), "the credentials have expired (ExpiredToken)", False),
        (Refusal(403, "SignatureDoesNotMatch", f"<StringToSign>{SECRET_KEY}</StringToSign>"),
         "the secret key does not belong to the access key (SignatureDoesNotMatch)", False),
        (Refusal(503, "SlowDown"), "the storage is receiving too many requests (SlowDown)", True),
        (Refusal(500, "InternalError"), "the storage has an internal error (InternalError)", True),
        (Refusal(501, "NotImplemented"), "it refused the request (NotImplemented)", True),
        (Refusal(400, "SomethingNew"), "it refused the request (SomethingNew)", False),
        (Refusal(418, f"<b>{SECRET_KEY}</b>"), "status 418", False),
        (Refusal(301, "PermanentRedirect"), "the bucket is in another region: set AWS_REGION", False),
    ],
)  # fmt: skip
def test_a_refusal_is_named_by_its_code_alone(
    server: ObjectServer, refusal: Refusal, why: str, transient: bool
) -> None:
    server.interfere = lambda _: refusal
    error = failure(client(server.url))
    assert str(error).removeprefix("s3://checkpoints/runs/gpt: list: ") == why
    assert error.is_transient == transient
    assert len(server.requests) == (QUICK.retries + 1 if refusal.status >= 500 else 1)


def test_a_bucket_that_does_not_exist_is_named(server: ObjectServer) -> None:
    location = object_location.parse("s3://no-such-bucket/runs")
    made = ObjectClient(location, credentials(server.url), QUICK)
    with pytest.raises(ObjectStoreError, match=r"^s3://no-such-bucket/runs: list: the bucket does not exist"):
        list(made.objects("runs", 10))


def test_an_unknown_access_key_is_not_repeated_in_the_message(server: ObjectServer) -> None:
    error = failure(client(server.url, AWS_ACCESS_KEY_ID="AKIAOTHER"))
    assert "the storage does not know the access key (InvalidAccessKeyId)" in str(error)
    assert "AKIAOTHER" not in str(error)


def test_an_endpoint_without_a_listener_is_a_transient_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    error = failure(client(f"http://127.0.0.1:{port}"))
    assert error.is_transient
    assert str(error).endswith(": cannot connect to the endpoint")


def test_an_endpoint_that_never_answers_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        error = failure(client(f"http://127.0.0.1:{silent.getsockname()[1]}", HASTY))
    assert error.is_transient
    assert str(error).endswith(": the request timed out")


def test_an_incomplete_configuration_is_reported_without_revealing_its_key() -> None:
    given = {"AWS_ACCESS_KEY_ID": ACCESS_KEY}
    with variables(given), pytest.raises(ObjectStoreError) as caught:
        ObjectClient(LOCATION, given)
    assert str(caught.value) == (
        "s3://checkpoints/runs/gpt: not configured:"
        " AWS_ACCESS_KEY_ID is set, but AWS_SECRET_ACCESS_KEY is not"
    )


def test_plain_http_is_used_only_for_an_endpoint_whose_url_requests_it(server: ObjectServer) -> None:
    assert list(client(server.url).objects("runs", 10)) == []
    error = failure(client(server.url.replace("http:", "https:"), HASTY))
    assert "cannot connect" in str(error) or "lost" in str(error)
    assert len(server.requests) == 1


def test_a_listing_is_bounded(server: ObjectServer) -> None:
    for number in range(4):
        server.put(f"runs/gpt/{number}", b"")
    made = client(server.url)
    assert len(list(made.objects("runs/gpt", 4))) == 4
    with pytest.raises(ObjectStoreError, match="more than 3 objects"):
        list(made.objects("runs/gpt", 3))
    server.put("runs/gpt/long", b"12345")
    with pytest.raises(ObjectStoreError, match="more than 4 bytes"):
        made.read("runs/gpt/long", 4)


def test_the_library_works_at_the_lowest_priority(server: ObjectServer) -> None:
    """The library's threads are those of a new process that exist only after its first request."""
    program = """
import os, sys
from holdfast.process.linux import LOWEST_PRIORITY
from tests.unit.sidecar.storage.conftest import LOCATION, QUICK, ObjectClient
before = set(os.listdir("/proc/self/task"))
assert list(ObjectClient(LOCATION, os.environ, QUICK).objects("runs", 10)) == []
found = set(os.listdir("/proc/self/task")) - before
nice = {os.getpriority(os.PRIO_PROCESS, int(each)) for each in found}
assert nice == {LOWEST_PRIORITY}, nice
"""
    given = {**os.environ, **credentials(server.url), "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", program], env=given, check=True, timeout=60)


def test_requests_that_the_storage_throttles_are_retried_later(server: ObjectServer, tmp_path: Path) -> None:
    refused: dict[str, int] = {}

    def interfere(request: Request) -> Fault | None:
        """Refuse each request twice, and cut one connection."""
        if request.method == "PUT" and request.conditions:
            return None
        refused[request.key] = refused.get(request.key, 0) + 1
        return (Refusal(503, "SlowDown"), Cut(), None)[min(refused[request.key], 3) - 1]

    server.interfere = interfere
    storage = storage_at(server.url, tmp_path / "copies")
    save(storage, 7)
    assert steps(storage) == {7: 1}
    assert storage.local_copy(storage.load("step-00000007"), (STATE,), lambda: None)[1] is None


# -- TLS, and the identity of a pod


@pytest.fixture(scope="module")
def authority() -> Authority:
    return new_authority(datetime.now(timezone.utc))


@pytest.fixture
def secure(authority: Authority, tmp_path: Path) -> Iterator[ObjectServer]:
    leaf = new_leaf(authority, ("localhost",), ("127.0.0.1",), datetime.now(timezone.utc))
    chain, context = tmp_path / "chain.pem", ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    chain.write_bytes(leaf.chain)
    context.load_cert_chain(chain)
    with serving(tmp_path / "objects", tls=context) as made:
        yield made


def test_a_server_with_its_own_authority_is_trusted_if_the_user_configures_that_authority(
    secure: ObjectServer, authority: Authority
) -> None:
    trusting = client(secure.url, certificates=bundle([authority]))
    trusting.write("runs/gpt/a", bytes(1000))
    assert trusting.read("runs/gpt/a", 1000) == bytes(1000)
    error = failure(client(secure.url, HASTY))
    assert str(error).endswith(": the certificate of the endpoint is not trusted")
    assert not error.is_transient


def test_a_pods_own_identity_replaces_a_secret_and_its_token_is_read_again(
    secure: ObjectServer, authority: Authority, tmp_path: Path
) -> None:
    """The kubelet replaces the token about once an hour."""
    token = tmp_path / "token"
    given = {
        "AWS_ENDPOINT_URL": secure.url,
        "AWS_ENDPOINT_URL_STS": secure.url,
        "AWS_REGION": "us-east-1",
        "AWS_ROLE_ARN": "arn:aws:iam::1:role/gpt",
        "AWS_WEB_IDENTITY_TOKEN_FILE": str(token),
        environment.OBJECTS_CA: bundle([authority]),
    }
    with variables(given):
        made = ObjectClient(LOCATION, given, QUICK)
    for each in ("first", "second"):
        token.write_text(each)
        assert list(made.objects("runs/gpt", 10)) == []
    assert secure.identities[0] == "first"
    assert secure.identities[-1] == "second"


# -- the other kinds


def test_google_and_azure_are_configured_from_the_environment() -> None:
    google = {"GOOGLE_BASE_URL": "http://127.0.0.1:9", "GOOGLE_SKIP_SIGNATURE": "true"}
    azure = {
        "AZURE_STORAGE_ACCOUNT_NAME": "account",
        "AZURE_STORAGE_ACCOUNT_KEY": "c2VjcmV0LXNlY3JldA==",
        "AZURE_STORAGE_ENDPOINT": "http://127.0.0.1:9/account",
    }
    for url, given in (("gs://checkpoints/runs/gpt", google), ("az://checkpoints/runs/gpt", azure)):
        location = object_location.parse(url)
        with variables(given):
            made = ObjectClient(location, given, HASTY)
        with pytest.raises(ObjectStoreError, match=rf"^{url}: list: cannot connect to the endpoint$"):
            list(made.objects("runs/gpt", 10))


def test_an_azure_container_needs_an_account() -> None:
    location = object_location.parse("az://checkpoints/runs/gpt")
    with (
        variables({}),
        pytest.raises(ObjectStoreError, match=r"not configured: AZURE_STORAGE_ACCOUNT_NAME is missing"),
    ):
        ObjectClient(location, {}, HASTY)


def test_an_invalid_certificate_of_the_users_is_reported(server: ObjectServer) -> None:
    certificate = "-----BEGIN CERTIFICATE-----\nno\n-----END CERTIFICATE-----"
    given = {**credentials(server.url), environment.OBJECTS_CA: certificate}
    with pytest.raises(ObjectStoreError, match="not configured"):
        ObjectClient(LOCATION, given, QUICK)

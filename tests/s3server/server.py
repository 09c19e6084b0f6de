"""A server that implements the part of S3 that checkpoints need, and fails where a test requests it.

It keeps objects as files in a directory, so states of gigabytes need no memory. Conditions of a PUT are
checked and obeyed under one lock, as in S3. The server verifies the access key, but not the signatures.
"""

from __future__ import annotations

import email.utils
import hashlib
import itertools
import os
import re
import shutil
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape, unescape

ACCESS_KEY = "AKIAHOLDFASTTEST"
SECRET_KEY = "a-secret-that-no-message-may-contain"
PIECE_BYTES = 1 << 20
_KEY = re.compile(rb"<Key>(.*?)</Key>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Request:
    method: str
    bucket: str
    key: str
    query: dict[str, str]
    conditions: dict[str, str]  # If-Match, If-None-Match
    sender: str = ""  # the client's address


@dataclass(frozen=True, slots=True)
class Refusal:
    """An error response in place of the correct one."""

    status: int
    code: str
    details: str = ""  # XML, as S3 gives it


@dataclass(frozen=True, slots=True)
class Cut:
    """Close the connection without an answer, either before or after the request is carried out."""

    after: bool = False


@dataclass(slots=True)
class Hang:
    """Answer nothing until `end` is set."""

    end: threading.Event = field(default_factory=threading.Event)


Fault = Refusal | Cut | Hang
Interference = Callable[[Request], Fault | None]


@dataclass(frozen=True, slots=True)
class _Object:
    path: Path
    bytes: int
    e_tag: str
    written_s: float


class ObjectServer:
    """The server, its buckets, and a record of the requests."""

    def __init__(self, root: Path, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None) -> None:
        self.root = root
        self.identities: list[str] = []  # the tokens for which credentials were issued, as STS does
        self.buckets: dict[str, dict[str, _Object]] = {"checkpoints": {}}
        self.requests: list[Request] = []
        self.interfere: Interference = lambda _: None
        self.ignored_conditions: frozenset[str] = frozenset()  # "If-Match", "If-None-Match"
        self.ages_s = 0.0  # the age that objects written from now on have from the start
        self.lock = threading.Lock()
        self._numbers = itertools.count()
        handler = type("Handler", (_Handler,), {"store": self})
        self._http = _Server((host, 0), handler)
        self.port: int = self._http.server_address[1]
        self.url = f"http{'s' if tls else ''}://{host}:{self.port}"
        if tls is not None:
            self._http.socket = tls.wrap_socket(
                self._http.socket, server_side=True, do_handshake_on_connect=False
            )
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def new_file(self) -> Path:
        return self.root / f"object-{next(self._numbers)}"

    def stored(self, bucket: str = "checkpoints") -> list[str]:
        with self.lock:
            return sorted(self.buckets[bucket])

    def filled(self, bucket: str = "checkpoints") -> list[str]:
        """Return the keys of the objects that are not empty, unlike manifests of removed checkpoints."""
        with self.lock:
            return sorted(key for key, each in self.buckets[bucket].items() if each.bytes)

    def content(self, key: str, bucket: str = "checkpoints") -> bytes:
        return self.buckets[bucket][key].path.read_bytes()

    def put(self, key: str, content: bytes, bucket: str = "checkpoints") -> None:
        path = self.new_file()
        path.write_bytes(content)
        with self.lock:
            self.store(bucket, key, path, hashlib.md5(content).hexdigest())

    def drop(self, key: str, bucket: str = "checkpoints") -> None:
        with self.lock:
            del self.buckets[bucket][key]

    def store(self, bucket: str, key: str, path: Path, e_tag: str) -> None:
        """Called with the lock held."""
        self.buckets[bucket][key] = _Object(path, path.stat().st_size, e_tag, time.time() - self.ages_s)

    def count(self, method: str, ending: str = "") -> int:
        return sum(each.method == method and each.key.endswith(ending) for each in self.requests)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore clients that cut their connections: the tests do this on purpose."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    store: ObjectServer

    def log_message(self, format: str, *args: object) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[[], None]:
        """Return the handler of every method, such as `do_GET`."""
        if not name.startswith("do_"):
            raise AttributeError(name)
        return self._handle

    def _handle(self) -> None:
        parts = urlsplit(self.path)
        bucket, _, key = unquote(parts.path).lstrip("/").partition("/")
        query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        if not bucket and query.get("Action") == "AssumeRoleWithWebIdentity":
            self._assume_role(query["WebIdentityToken"])
            return
        conditions = {
            name: value for name in ("If-Match", "If-None-Match") if (value := self.headers.get(name))
        }
        request = Request(self.command, bucket, key, query, conditions, str(self.client_address[0]))
        self.store.requests.append(request)
        fault = self.store.interfere(request)
        if isinstance(fault, Hang):
            fault.end.wait()
            fault = Cut()
        if isinstance(fault, Cut) and not fault.after:
            self._cut()
            return
        body = self._body()
        if isinstance(fault, Refusal):
            self._refuse(fault)
        elif f"Credential={ACCESS_KEY}/" not in self.headers.get("Authorization", ""):
            given = self.headers.get("Authorization", "")
            self._refuse(Refusal(403, "InvalidAccessKeyId", f"<AWSAccessKeyId>{given}</AWSAccessKeyId>"))
        elif bucket not in self.store.buckets:
            self._refuse(Refusal(404, "NoSuchBucket", f"<BucketName>{bucket}</BucketName>"))
        elif isinstance(fault, Cut):
            self._answer(request, body, silent=True)
            self._cut()
        else:
            self._answer(request, body)

    def _assume_role(self, token: str) -> None:
        """Return expired credentials, so that the client reads the token again for its next request."""
        self._body()
        self.store.identities.append(token)
        given = (
            f"<AccessKeyId>{ACCESS_KEY}</AccessKeyId><SecretAccessKey>{SECRET_KEY}</SecretAccessKey>"
            "<SessionToken>session</SessionToken><Expiration>2020-01-01T00:00:00Z</Expiration>"
        )
        answer = f"<Credentials>{given}</Credentials>"
        for name in ("AssumeRoleWithWebIdentityResult", "AssumeRoleWithWebIdentityResponse"):
            answer = f"<{name}>{answer}</{name}>"
        self._reply(200, answer.encode(), {})

    def _cut(self) -> None:
        self.close_connection = True
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def _body(self) -> tuple[Path, str]:
        """Read the body into a file."""
        left, digest, path = int(self.headers.get("Content-Length", 0)), hashlib.md5(), self.store.new_file()
        with open(path, "wb") as file:
            while left:
                piece = self.rfile.read(min(left, PIECE_BYTES))
                if not piece:
                    raise ConnectionError("the client has cut the connection")
                file.write(piece)
                digest.update(piece)
                left -= len(piece)
        return path, digest.hexdigest()

    def _answer(self, request: Request, body: tuple[Path, str], silent: bool = False) -> None:
        objects = self.store.buckets[request.bucket]
        status, headers, content = 200, dict[str, str](), b""
        if request.method == "PUT":
            with self.store.lock:
                present = objects.get(request.key)
                if not _holds(request, present, self.store.ignored_conditions):
                    status = 404 if present is None else 412
                else:
                    self.store.store(request.bucket, request.key, *body)
                    headers["ETag"] = f'"{body[1]}"'
            if status != 200:
                code = "NoSuchKey" if status == 404 else "PreconditionFailed"
                if not silent:
                    self._refuse(Refusal(status, code))
                return
        elif request.method == "POST" and "delete" in request.query:
            keys = [unescape(key.decode()) for key in _KEY.findall(body[0].read_bytes())]
            with self.store.lock:
                for key in keys:
                    objects.pop(key, None)
            deleted = "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys)
            content = f"<DeleteResult>{deleted}</DeleteResult>".encode()
        elif request.method == "DELETE":
            with self.store.lock:
                objects.pop(request.key, None)
            status = 204
        elif not request.key:
            content = self._listing(request, objects)
        else:
            found = objects.get(request.key)
            if not silent:
                self._send(found)
            return
        if not silent:
            self._reply(status, content, headers)

    def _listing(self, request: Request, objects: dict[str, _Object]) -> bytes:
        prefix, most = request.query.get("prefix", ""), int(request.query.get("max-keys", 1000))
        after = request.query.get("continuation-token", "")
        with self.store.lock:
            keys = sorted(key for key in objects if key.startswith(prefix) and key > after)
            some = [(key, objects[key]) for key in keys[:most]]
        contents = "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>{_iso(each.written_s)}</LastModified>"
            f"<ETag>&quot;{each.e_tag}&quot;</ETag><Size>{each.bytes}</Size></Contents>"
            for key, each in some
        )
        token = (
            f"<NextContinuationToken>{escape(keys[most - 1])}</NextContinuationToken>"
            if len(keys) > most
            else ""
        )
        return (
            f"<ListBucketResult><IsTruncated>{str(len(keys) > most).lower()}</IsTruncated>"
            f"<KeyCount>{len(some)}</KeyCount>{token}{contents}</ListBucketResult>"
        ).encode()

    def _send(self, found: _Object | None) -> None:
        if found is None:
            self._refuse(Refusal(404, "NoSuchKey"))
            return
        begin, end = 0, found.bytes
        status = 200
        if (wanted := self.headers.get("Range")) is not None:
            low, _, high = wanted.removeprefix("bytes=").partition("-")
            begin, end, status = int(low), min(int(high) + 1 if high else end, end), 206
        self.send_response(status)
        if status == 206:
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{found.bytes}")
        self.send_header("Content-Length", str(end - begin))
        self.send_header("ETag", f'"{found.e_tag}"')
        self.send_header("Last-Modified", email.utils.formatdate(found.written_s, usegmt=True))
        self.end_headers()
        if self.command != "HEAD":
            with open(found.path, "rb") as file:
                self.wfile.flush()
                file.seek(begin)
                while begin < end and not isinstance(self.connection, ssl.SSLSocket):
                    begin += os.sendfile(self.connection.fileno(), file.fileno(), begin, end - begin)
                self.wfile.write(file.read(end - begin))

    def _refuse(self, refusal: Refusal) -> None:
        text = f"<Error><Code>{refusal.code}</Code><Message>{SECRET_KEY}</Message>{refusal.details}</Error>"
        self._reply(refusal.status, text.encode(), {})

    def _reply(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if status != 204:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD" and status != 204:
            self.wfile.write(content)


def _holds(request: Request, present: _Object | None, ignored: frozenset[str]) -> bool:
    conditions = {name: value for name, value in request.conditions.items() if name not in ignored}
    if conditions.get("If-None-Match") == "*":
        return present is None
    wanted = conditions.get("If-Match")
    return wanted is None or (present is not None and wanted.strip('"') == present.e_tag)


def _iso(written_s: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(written_s)) + f".{int(written_s % 1 * 1000):03d}Z"


@contextmanager
def serving(root: Path, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None) -> Iterator[ObjectServer]:
    """Run the server. Its objects are files in the new directory `root`, which is removed at the end."""
    root.mkdir(parents=True)
    server = ObjectServer(root, host, tls)
    try:
        yield server
    finally:
        server.close()
        shutil.rmtree(root, ignore_errors=True)


def credentials(url: str) -> dict[str, str]:
    """Return the environment variables with which a sidecar uses a server at `url`."""
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_REGION": "us-east-1",
    }

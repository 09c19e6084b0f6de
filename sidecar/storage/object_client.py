"""Send requests to object storage: S3 and compatible services, Google Cloud Storage, or Azure.

Only this module uses the obstore library, which reads the credentials from the environment or from the
machine's metadata service. Error messages never contain credentials: they include the storage's error code,
but none of its text.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeAlias

import obstore
from obstore import exceptions
from obstore.store import AzureStore, GCSStore, MemoryStore, S3Store

from holdfast.checkpoint.object_location import ObjectLocation
from holdfast.process import linux
from holdfast.protocol import environment

if TYPE_CHECKING:
    from obstore import UpdateVersion

_Store: TypeAlias = "S3Store | GCSStore | AzureStore"

# The variables that set an endpoint other than the provider's. If one begins with http://, plain HTTP is
# allowed.
ENDPOINTS = (
    "AWS_ENDPOINT_URL_S3",
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT",
    "GOOGLE_BASE_URL",
    "AZURE_STORAGE_ENDPOINT",
    "AZURE_ENDPOINT",
)
LISTED = 1000  # objects per response, the maximum in S3

_CODE = re.compile(r"<Code>([A-Za-z0-9.]{1,64})</Code>")
_STATUS = re.compile(r"status code: ([45]\d\d)\b")
_MEANINGS = {
    "NoSuchBucket": "the bucket does not exist",
    "ContainerNotFound": "the container does not exist",
    "AccessDenied": "the credentials do not permit the request",
    "AllAccessDisabled": "the bucket is disabled",
    "AuthorizationPermissionMismatch": "the credentials do not permit the request",
    "AuthenticationFailed": "the credentials are not valid",
    "ExpiredToken": "the credentials have expired",
    "InvalidToken": "the session token is not valid",
    "InvalidAccessKeyId": "the storage does not know the access key",
    "SignatureDoesNotMatch": "the secret key does not belong to the access key",
    "RequestTimeTooSkewed": "this machine's clock is wrong",
    "PermanentRedirect": "the bucket is in another region: set AWS_REGION",
    "AuthorizationHeaderMalformed": "the bucket is in another region: set AWS_REGION",
    "ConditionalRequestConflict": "another writer was changing the object",
    "OperationAborted": "another writer was changing the object",
    "SlowDown": "the storage is receiving too many requests",
    "ServiceUnavailable": "the storage is overloaded",
    "InternalError": "the storage has an internal error",
}
_TRANSIENT = frozenset(
    {"ConditionalRequestConflict", "OperationAborted", "SlowDown", "ServiceUnavailable", "InternalError"}
    | {"RequestTimeout"}
)


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """How long requests may take, in seconds.

    Each limit applies to a single request; a whole checkpoint has no limit. Writing a part may take
    `write_s`, so a connection is fast enough if it transfers 8 MiB in that time. Reading a part fails after
    `stall_s` without a byte, or after `read_s`. All other requests may take `answer_s`.
    """

    connect_s: float = 10.0
    answer_s: float = 20.0
    write_s: float = 300.0
    read_s: float = 600.0
    stall_s: float = 30.0
    retry_s: float = 90.0  # no attempt begins later than this after the first attempt
    retries: int = 8
    first_pause_s: float = 0.2
    longest_pause_s: float = 10.0


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object in a listing. `written_s` is in seconds since 1970, according to the storage's clock."""

    key: str
    bytes: int
    version: ObjectVersion
    written_s: float


@dataclass(frozen=True, slots=True)
class ObjectVersion:
    """Identifies the content of an object. The kind of storage determines which of the two fields are set."""

    e_tag: str | None
    number: str | None


class ObjectStoreError(OSError):
    """A request failed.

    The message contains the location, the operation and the reason, in one line without secrets.
    """

    def __init__(self, message: str, transient: bool = False) -> None:
        super().__init__(message)
        self.is_transient = transient


class ObjectClient:
    """Sends requests to the bucket of `location`. Keys are absolute.

    All methods block, and raise `ObjectStoreError`.
    """

    def __init__(
        self, location: ObjectLocation, given: Mapping[str, str], limits: RequestLimits | None = None
    ) -> None:
        """`given` is the environment, which the library also reads directly. Raises `ObjectStoreError`."""
        self._location = location
        within = limits or RequestLimits()
        _start_library()
        try:
            self._quick = _store(location, given, within, within.answer_s)
            # The library must not retry conditional writes: the retry's result does not show whether the
            # first attempt succeeded, so the caller has to handle each attempt.
            self._once = _store(location, given, replace(within, retries=0), within.answer_s)
            self._writing = _store(location, given, within, within.write_s)
            self._reading = _store(location, given, within, within.read_s, within.stall_s)
        except (exceptions.BaseError, ValueError) as error:
            raise ObjectStoreError(f"{location}: not configured: {_configuration_fault(error)}") from None

    def objects(self, below: str, most: int | None = None) -> Iterator[StoredObject]:
        """Yield the objects in the folder `below` and its subfolders, in any order.

        Raises `ObjectStoreError` if there are more than `most`.
        """
        count = 0
        with self._errors("list"):
            for some in obstore.list(self._quick, f"{below}/", chunk_size=LISTED):
                for each in some:
                    count += 1
                    if most is not None and count > most:
                        raise ObjectStoreError(f"{self._location}: more than {most} objects below {below}")
                    version = ObjectVersion(each["e_tag"], each["version"])
                    yield StoredObject(each["path"], each["size"], version, each["last_modified"].timestamp())

    def read(self, key: str, most_bytes: int) -> bytes | None:
        """Return the content of an object; None if it does not exist.

        Raises `ObjectStoreError` if it has more than `most_bytes`.
        """
        try:
            with self._errors("read"):
                got = obstore.get(self._reading, key)
                if got.meta["size"] > most_bytes:
                    raise ObjectStoreError(f"{self._location}: {key} has more than {most_bytes} bytes")
                return got.bytes().to_bytes()
        except _Missing:
            return None

    def read_range(self, key: str, begin: int, end: int) -> bytes | None:
        """Return the bytes of an object from `begin` up to `end`; None if the object does not exist."""
        try:
            with self._errors("read"):
                return obstore.get_range(self._reading, key, start=begin, end=end).to_bytes()
        except _Missing:
            return None

    def write(self, key: str, content: bytes) -> None:
        """Write an object, replacing any existing one."""
        with self._errors("write"):
            obstore.put(self._writing, key, content, use_multipart=False)

    def create(self, key: str, content: bytes) -> bool:
        """Write an object if it does not exist; return False if it does.

        If several writers create the same object, only one of them succeeds. The request is not retried.
        After a transient error, it may have been carried out.
        """
        try:
            with self._errors("write"):
                obstore.put(self._once, key, content, mode="create")
        except _Exists:
            return False
        return True

    def replace(self, key: str, content: bytes, version: ObjectVersion) -> bool:
        """Replace an object if it still has this version; return False if it does not.

        As with `create`, the request is not retried.
        """
        expected: UpdateVersion = {}
        if version.e_tag is not None:
            expected["e_tag"] = version.e_tag
        if version.number is not None:
            expected["version"] = version.number
        try:
            with self._errors("write"):
                obstore.put(self._once, key, content, mode=expected)
        except (_Exists, _Missing):
            return False
        return True

    def version(self, key: str) -> ObjectVersion | None:
        """Return the current version of an object; None if the object does not exist."""
        try:
            with self._errors("read"):
                found = obstore.head(self._quick, key)
        except _Missing:
            return None
        return ObjectVersion(found["e_tag"], found["version"])

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects. Objects that do not exist are ignored."""
        for begin in range(0, len(keys), LISTED):
            some = list(keys[begin : begin + LISTED])
            try:
                with self._errors("delete"):
                    obstore.delete(self._quick, some)
            except _Missing:  # Google and Azure fail if any object is missing, so delete each one separately
                for key in some:
                    self._delete_one(key)

    def _delete_one(self, key: str) -> None:
        try:
            with self._errors("delete"):
                obstore.delete(self._quick, key)
        except _Missing:
            pass

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        """Translate the library's exceptions. `_Missing` and `_Exists` must not leave this class."""
        try:
            yield
        except (exceptions.AlreadyExistsError, exceptions.PreconditionError):
            raise _Exists(f"{self._location}: {what}: it exists") from None
        except FileNotFoundError as error:
            code = _CODE.search(str(error))
            if code is not None and code[1] in ("NoSuchBucket", "ContainerNotFound"):
                raise self._failure(what, error) from None
            raise _Missing(f"{self._location}: {what}: it does not exist") from None
        except ObjectStoreError:
            raise
        except (exceptions.BaseError, ValueError, OSError) as error:
            raise self._failure(what, error) from None

    def _failure(self, what: str, error: Exception) -> ObjectStoreError:
        why, transient = _why(error)
        return ObjectStoreError(f"{self._location}: {what}: {why}", transient)


class _Missing(ObjectStoreError):
    """The object does not exist."""


class _Exists(ObjectStoreError):
    """The object exists, or its version is not the expected one."""


@functools.cache
def _start_library() -> None:
    """Make the library start its threads with the lowest priority.

    The threads hash and encrypt while the ranks train. They inherit their priority from the thread that sends
    the first request.
    """

    def request() -> None:
        with suppress(OSError):  # a container may forbid this
            linux.lower_thread_priority()
        obstore.put(MemoryStore(), "none", b"")

    starting = threading.Thread(target=request, name="start-objects")
    starting.start()
    starting.join()


def _store(
    location: ObjectLocation,
    given: Mapping[str, str],
    limits: RequestLimits,
    request_s: float,
    stall_s: float = 0.0,
) -> _Store:
    """Return the library's store. The options given here replace all default options of its HTTP client."""
    options: dict[str, Any] = {
        "allow_http": any(given.get(each, "").startswith("http://") for each in ENDPOINTS),
        "connect_timeout": timedelta(seconds=limits.connect_s),
        "timeout": timedelta(seconds=request_s),
        "user_agent": "holdfast",
    }
    if stall_s:
        options["read_timeout"] = timedelta(seconds=stall_s)
    if given.get(environment.OBJECTS_CA):
        options["root_certificate"] = given[environment.OBJECTS_CA]
    backoff = {
        "init_backoff": timedelta(seconds=limits.first_pause_s),
        "max_backoff": timedelta(seconds=limits.longest_pause_s),
        "base": 2,
    }
    retry = {
        "max_retries": limits.retries,
        "retry_timeout": timedelta(seconds=limits.retry_s),
        "backoff": backoff,
    }
    kind: Any = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}[location.scheme]
    made: _Store = kind(location.bucket, client_options=options, retry_config=retry)
    return made


def _why(error: Exception) -> tuple[str, bool]:
    """Return the reason for an error, and whether the error is transient.

    The reason contains none of the storage's own text, which might include secrets.
    """
    text = str(error)
    status, code = _STATUS.search(text), _CODE.search(text)
    if any(each in text for each in _METADATA):
        return "no credentials were found, neither in the environment nor from a metadata service", False
    if code is not None:
        meaning = _MEANINGS.get(code[1], "it refused the request")
        number = int(status[1]) if status is not None else 0
        return f"{meaning} ({code[1]})", code[1] in _TRANSIENT or number >= 500
    if isinstance(error, exceptions.PermissionDeniedError):
        return "the credentials do not permit the request (403)", False
    if isinstance(error, exceptions.UnauthenticatedError):
        return "the credentials are not valid (401)", False
    if isinstance(error, exceptions.NotSupportedError):
        return "the storage does not support the request", False
    if status is not None:
        return f"status {status[1]}", int(status[1]) >= 500 or status[1] in ("408", "429")
    return next((meaning for part, meaning in _TROUBLE if part in text), _UNKNOWN)


# The metadata services that give the library credentials if the environment has none.
_METADATA = ("169.254.169.254", "169.254.170.2", "metadata.google.internal")
# Parts of the library's messages about requests without a response, and their meanings. The most specific
# come first.
_TROUBLE = (
    ("redirect without LOCATION", ("the bucket is in another region: set AWS_REGION", False)),
    ("BadScheme", ("an endpoint does not begin with https:// (or, for the storage, http://)", False)),
    ("InvalidCertificate", ("the certificate of the endpoint is not trusted", False)),
    ("TimedOut", ("the request timed out", True)),
    ("timed out", ("the request timed out", True)),
    ("dns error", ("the endpoint's name cannot be resolved", True)),
    ("kind: Connect", ("cannot connect to the endpoint", True)),
    ("error sending request", ("the connection was lost", True)),
    ("kind: Interrupted", ("the connection was lost", True)),
    ("kind: Decode", ("the connection was lost", True)),
    ("kind: Body", ("the connection was lost", True)),
    ("IncompleteMessage", ("the connection was lost", True)),
)
_UNKNOWN = ("the response is not understood", False)


def _configuration_fault(error: Exception) -> str:
    """Return what is wrong with the configuration, without its values, because these can be secrets."""
    text = str(error)
    for part, meaning in _CONFIGURATION.items():
        if part in text:
            return meaning
    return f"{type(error).__name__} for the credentials or the endpoint in the environment"


_CONFIGURATION = {
    "MissingAccount": "AZURE_STORAGE_ACCOUNT_NAME is missing",
    "MissingAccessKeyId": "AWS_SECRET_ACCESS_KEY is set, but AWS_ACCESS_KEY_ID is not",
    "MissingSecretAccessKey": "AWS_ACCESS_KEY_ID is set, but AWS_SECRET_ACCESS_KEY is not",
    "builder error": "the endpoint is not a valid URL",
}

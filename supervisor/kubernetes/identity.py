"""Identify a request's sender: the pod that its projected token was issued to.

The API server reviews the token for Holdfast's own audience; this module does not decode it. A pod's token
for the API server itself is refused, because it must not be sent anywhere else. Nothing that a peer claims
about itself is trusted.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from supervisor.kubernetes.client import KubernetesObject, ResourceKind
from supervisor.kubernetes.errors import ApiError

TOKEN_REVIEWS = ResourceKind("authentication.k8s.io", "v1", "tokenreviews", namespaced=False)
VALID_S = 60.0  # an accepted token is not reviewed again for this long, even if its pod has been deleted
REFUSED_S = 5.0  # a refused token is not reviewed again for this long
# the number of callers: four times as many as the members that one supervisor is designed for
REMEMBERED = 8192
REMEMBERED_REFUSALS = 1024  # stored apart from the callers, so that junk cannot displace them
AT_ONCE = 32  # concurrent reviews; when a new leader starts, all members connect at the same time
TOKEN_BYTES = 16384  # a service account's token is about 1 KiB long
_V = TypeVar("_V")
_JWT = re.compile(r"[\w-]+\.[\w-]+\.[\w-]+", re.ASCII)
_ACCOUNT = re.compile(r"system:serviceaccount:([^:]+):([^:]+)")
_EXTRA = "authentication.kubernetes.io/"


@dataclass(frozen=True, slots=True)
class Caller:
    """A pod, as the API server identified it. `node` is "" on Kubernetes versions before 1.32."""

    namespace: str
    pod: str
    pod_uid: str
    node: str
    service_account: str


@dataclass(frozen=True, slots=True)
class TokenRefused:
    """The token does not identify a pod. `why` can be shown to its sender."""

    why: str


@dataclass(frozen=True, slots=True)
class ReviewUnavailable:
    """The API server could not review the token, which may be valid. The caller should try again."""

    why: str


class Reviews(Protocol):
    """The method of `ApiServer` that a reviewer needs."""

    async def create(self, kind: ResourceKind, body: KubernetesObject) -> KubernetesObject: ...


class TokenReviewer:
    """Asks the API server to review tokens, and briefly remembers each result by the hash of the token."""

    def __init__(self, server: Reviews, audience: str) -> None:
        self._server, self._audience = server, audience
        self._callers: _Remembered[Caller] = _Remembered(REMEMBERED, VALID_S)
        self._refusals: _Remembered[TokenRefused] = _Remembered(REMEMBERED_REFUSALS, REFUSED_S)
        self._turns = asyncio.Semaphore(AT_ONCE)

    async def review(self, token: str) -> Caller | TokenRefused | ReviewUnavailable:
        """Return the pod that the token belongs to. This can take as long as a request to the API server.

        A token that the API server confirmed less than `VALID_S` ago is accepted even if the server is
        unreachable.
        """
        if len(token) > TOKEN_BYTES or not _JWT.fullmatch(token):
            return TokenRefused("this is not a token of a service account")
        key = hashlib.sha256(token.encode()).digest()
        known = self._known(key)
        if known is not None:
            return known
        async with self._turns:
            return self._known(key) or await self._ask(key, token)

    def _known(self, key: bytes) -> Caller | TokenRefused | None:
        now_s = asyncio.get_running_loop().time()
        return self._callers.get(key, now_s) or self._refusals.get(key, now_s)

    async def _ask(self, key: bytes, token: str) -> Caller | TokenRefused | ReviewUnavailable:
        sent_s = asyncio.get_running_loop().time()
        spec = {"token": token, "audiences": [self._audience]}
        body = {"apiVersion": TOKEN_REVIEWS.api_version, "kind": "TokenReview", "spec": spec}
        try:
            answer = await self._server.create(TOKEN_REVIEWS, body)
        except (ApiError, OSError) as error:
            return ReviewUnavailable(str(error))
        found = caller_of(answer.get("status"), self._audience)
        if isinstance(found, Caller):
            self._callers.put(key, found, sent_s)
        else:
            self._refusals.put(key, found, sent_s)
        return found


def caller_of(status: object, audience: str) -> Caller | TokenRefused:
    """Return the pod in the status of a TokenReview."""
    if not isinstance(status, dict) or status.get("authenticated") is not True:
        error = status.get("error") if isinstance(status, dict) else None
        return TokenRefused(f"the API server does not accept this token: {error or 'no reason given'}")
    # A server that does not support audiences accepts a token for any audience and lists none.
    if audience not in (status.get("audiences") or ()):
        return TokenRefused(f"the token is not for the audience {audience}")
    user = status.get("user") or {}
    account = _ACCOUNT.fullmatch(str(user.get("username", "")))
    extra = user.get("extra") or {}
    pod, uid = _single(extra, "pod-name"), _single(extra, "pod-uid")
    if account is None or not pod or not uid:
        return TokenRefused("the token is not bound to a pod: mount it as a projected volume")
    return Caller(account[1], pod, uid, _single(extra, "node-name"), account[2])


def _single(extra: Mapping[str, Any], name: str) -> str:
    values = extra.get(_EXTRA + name)
    return str(values[0]) if isinstance(values, list) and len(values) == 1 else ""


class _Remembered(Generic[_V]):
    """Stores the newest `limit` answers. Each is valid for `valid_s` after its request was sent."""

    def __init__(self, limit: int, valid_s: float) -> None:
        self._limit, self._valid_s = limit, valid_s
        self._answers: OrderedDict[bytes, tuple[float, _V]] = OrderedDict()

    def get(self, key: bytes, now_s: float) -> _V | None:
        sent_s, answer = self._answers.get(key, (0.0, None))
        if answer is None or now_s - sent_s < self._valid_s:
            return answer
        del self._answers[key]
        return None

    def put(self, key: bytes, answer: _V, sent_s: float) -> None:
        self._answers.pop(key, None)
        self._answers[key] = (sent_s, answer)
        if len(self._answers) > self._limit:
            self._answers.popitem(last=False)

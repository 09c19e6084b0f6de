"""Writes to one Node object of the API server, with the files of a pod's service account.

This is the agent's only client of the API server. It needs no other library, and every wait is bounded.
"""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from holdfast.version import __version__

FIELD_MANAGER = "holdfast-nodeagent"
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")  # in every pod, unless it opts out
TOKEN, AUTHORITY = "token", "ca.crt"
# The time limit for each step: connecting, the handshake, sending, and each part of the answer. A healthy API
# server answers within 0.1 s. A server that takes longer is overloaded, and a heartbeat may then be late.
WAIT_S = 4.0
MAX_ANSWER_BYTES = 64 << 10
MAX_WHY = 300  # characters


@dataclass(frozen=True, slots=True)
class NotWritten:
    """Why a write failed."""

    kind: str  # the same for failures of the same kind
    why: str  # one line
    wait_s: float = 0.0  # how long the server asks to wait before the next try


@dataclass(frozen=True, slots=True)
class NodeObject:
    """The Node object of one node, and how to reach the API server."""

    host: str
    port: int
    node: str
    account: Path = ACCOUNT  # the folder with the token and the certificate authority

    def patch_status(self, patch: Mapping[str, Any], wait_s: float = WAIT_S) -> NotWritten | None:
        """Merge a strategic patch into the object through its status subresource.

        Returns None, or why the object may not have been changed. The call is safe to repeat. It reads the
        token and the authority each time, because the kubelet replaces both.
        """
        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.load_verify_locations(self.account / AUTHORITY)
            token = (self.account / TOKEN).read_text(encoding="ascii").strip()
            if not token or not token.isprintable():
                return NotWritten("account", f"{self.account / TOKEN}: it does not contain a token")
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            return NotWritten("account", f"{self.account}: {error}")
        connection = http.client.HTTPSConnection(self.host, self.port, timeout=wait_s, context=context)
        try:
            connection.request("PATCH", self._path(), json.dumps(patch).encode(), _headers(token))
            answer = connection.getresponse()
            text = answer.read(MAX_ANSWER_BYTES)
        except (
            OSError,
            http.client.HTTPException,
            ValueError,
        ) as error:  # ValueError: a token with a newline
            why = (
                f"the API server at {self.host}:{self.port} does not answer: {error or type(error).__name__}"
            )
            return NotWritten("unreachable", why[:MAX_WHY])
        finally:
            connection.close()
        if answer.status == http.HTTPStatus.OK:
            return None
        said = f"the API server refuses the write: {answer.status} {_message(text)}"
        return NotWritten(str(answer.status), said[:MAX_WHY], _seconds(answer.getheader("Retry-After")))

    def _path(self) -> str:
        return f"/api/v1/nodes/{quote(self.node, safe='')}/status?fieldManager={FIELD_MANAGER}"


def _headers(token: str) -> dict[str, str]:
    return {
        "Authorization": f"Bearer {token}",
        "Content-Type": "application/strategic-merge-patch+json",
        # Ask for the object's metadata only, because a whole Node lists the images on its disk.
        "Accept": "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1,application/json",
        "User-Agent": f"{FIELD_MANAGER}/{__version__}",
    }


def _message(text: bytes) -> str:
    """Return the message of an API server's Status, or the text of another answer, as one line."""
    try:
        found = json.loads(text)
        said = str(found["message"]) if isinstance(found, dict) and "message" in found else ""
    except (ValueError, RecursionError):
        said = text[:MAX_WHY].decode(errors="replace")
    return " ".join(said.split())


def _seconds(text: str | None) -> float:
    return float(text[:6]) if text is not None and text.isascii() and text.isdecimal() else 0.0

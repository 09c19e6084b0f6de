"""Connect a command to the API server, and turn failures into one-line messages.

The connection has the rights that the user's kubeconfig grants. The `kubernetes` library reads that file, and
is imported only when a connection is made.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from holdfast.errors import BadInput
from holdfast.process import event_loop
from supervisor.cli.command_options import ClusterOptions
from supervisor.kubernetes.access import ClusterNotConfigured
from supervisor.kubernetes.client import ApiServer, connect
from supervisor.kubernetes.errors import ApiError, Forbidden, ServerUnreachable, Unauthenticated

NOT_INSTALLED = (
    "Holdfast is not installed in this cluster: install it with `kubectl apply -k manifests/default`"
)
_LIBRARY = "kubernetes"
_MISSING = "commands for a cluster need a library that this Python lacks: pip install 'holdfast[cluster]'"
_DENIED = re.compile(
    r'User "(?P<user>[^"]*)" cannot (?P<verb>\w+) resource "(?P<resource>[^"]+)"'
    r'(?:.* in the namespace "(?P<namespace>[^"]+)")?'
)
# The ClusterRoles that grant a right: Holdfast's own roles in manifests/base/access.yaml, and the standard
# roles that include them.
_VIEW = "the ClusterRole holdfast-view has that right, as do view, edit and admin"
_EDIT = "the ClusterRole holdfast-edit has that right, as do edit and admin"

_WITHOUT_NAMESPACE = ("namespaces", "nodes", "mutatingwebhookconfigurations")

_T = TypeVar("_T")


class ClusterConnection:
    """A synchronous client of one API server."""

    def __init__(self, loop: asyncio.AbstractEventLoop, server: ApiServer) -> None:
        self._loop, self._server = loop, server

    @property
    def namespace(self) -> str:
        """The namespace of the kubeconfig's context."""
        return self._server.namespace

    def ask(self, work: Callable[[ApiServer], Awaitable[_T]]) -> _T:
        """Run `work` with the API server, and return its result. Raises the exceptions of `ApiServer`."""

        async def asked() -> _T:
            return await work(self._server)

        return self._loop.run_until_complete(asked())


@contextmanager
def connected(options: ClusterOptions) -> Iterator[ClusterConnection]:
    """Yield a connection to the cluster that `options` select.

    Raises:
        BadInput: No cluster is configured, or the API server does not respond or refuses a request of the
            `with` block.
    """
    loop = asyncio.new_event_loop()
    try:
        with _in_words(options.context):
            server = loop.run_until_complete(connect(context=options.context or None))
            try:
                yield ClusterConnection(loop, server)
            finally:
                _cancel_requests(loop)
                loop.run_until_complete(server.close())
    finally:
        _cancel_requests(loop)
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


def _cancel_requests(loop: asyncio.AbstractEventLoop) -> None:
    """End the request that Ctrl-C interrupted, because asyncio would otherwise report a destroyed task."""
    requests = asyncio.all_tasks(loop)
    if requests:
        loop.run_until_complete(event_loop.end(requests))


@contextmanager
def _in_words(context: str) -> Iterator[None]:
    """Translate errors from the API server and the kubeconfig into `BadInput`."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != _LIBRARY:
            raise
        raise BadInput(_MISSING) from None
    except ClusterNotConfigured as error:
        if context and "/contexts list" in str(error):  # the library's message for an unknown context
            lists = "`kubectl config get-contexts` lists all contexts"
            raise BadInput(f"no context {context!r} in the kubeconfig: {lists}") from None
        raise BadInput(_one_line(error)) from None
    except ServerUnreachable as error:
        raise BadInput(f"the API server does not respond: {_one_line(error.message)}") from None
    except Unauthenticated:
        why = "the API server does not accept the credentials of your kubeconfig: log in to the cluster again"
        raise BadInput(why) from None
    except Forbidden as error:
        raise BadInput(denial(error)) from None
    except ApiError as error:
        raise BadInput(f"the API server refused the request: {_one_line(error)}") from None


def denial(error: Forbidden) -> str:
    """Return a message that names the missing right and, for supervisions, the roles that grant it."""
    found = _DENIED.search(error.message)
    if found is None:  # a quota or an admission check
        return f"the API server refused the request: {_one_line(error.message)}"
    where = f" in namespace {found['namespace']!r}" if found["namespace"] else " in all namespaces"
    where = "" if found["resource"] in _WITHOUT_NAMESPACE else where
    text = f"forbidden: {found['user']!r} may not {found['verb']} {found['resource']}{where}"
    if found["resource"] != "supervisions":
        return text
    return f"{text}; {_VIEW if found['verb'] in ('get', 'list', 'watch') else _EDIT}"


def _one_line(text: object) -> str:
    return " ".join(str(text).split())

"""Find the API server and the credentials for it, from a kubeconfig or the pod's service account.

The `kubernetes` library reads the kubeconfig, because it supports all common forms (merged files, exec
plugins, OIDC). It is imported only when needed, because the import takes 0.1 s and 20 MB.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import ssl
import urllib.request
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

log = logging.getLogger(__name__)

PLUGIN_S = 120.0  # the kubeconfig's plugin may ask the user to log in
_IN_POD = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class ClusterNotConfigured(Exception):
    """No API server is configured, or its configuration is unusable. The message is for the user."""


class Credentials(Protocol):
    """This process's credentials, which may change while it runs."""

    async def header(self) -> str:
        """Return the value of the Authorization header; "" if the access does not use one."""

    async def renew(self, refused: str) -> bool:
        """Load the credentials again after the server has refused the header `refused`.

        Return True if the header has changed, which makes the request worth repeating.
        """


@dataclass(frozen=True, slots=True)
class ServerAccess:
    """An API server and how to reach it.

    `server_name` is the name in the server's certificate, if it differs from the host name.
    """

    url: str
    credentials: Credentials
    tls: ssl.SSLContext | None = None
    namespace: str = "default"
    server_name: str = ""
    proxy: str = ""


async def find_access(kubeconfig: str | Path | None = None, context: str | None = None) -> ServerAccess:
    """Return the access specified by the arguments, or else by $KUBECONFIG, ~/.kube/config or this pod.

    Raises:
        ClusterNotConfigured: None of these exists, or the first one that exists is unusable.
    """
    path = str(kubeconfig or os.environ.get("KUBECONFIG") or "")
    default = Path(os.environ.get("HOME") or "/") / ".kube" / "config"
    if not path and default.is_file():
        path = str(default)
    if path:
        return await _from_kubeconfig(path, context)
    if context is not None:
        raise ClusterNotConfigured(f"context {context!r} was requested, but there is no kubeconfig")
    if os.environ.get("KUBERNETES_SERVICE_HOST"):
        return await _from_pod(_IN_POD)
    raise ClusterNotConfigured(
        "no cluster is configured: KUBECONFIG is not set, ~/.kube/config does not exist, and this process"
        " does not run in a pod; set KUBECONFIG to the path of the cluster's kubeconfig"
    )


class _LibraryCredentials:
    """Provides the token of a library configuration. The library rereads a pod's token file every minute."""

    def __init__(self, configuration: Any, load: Callable[[], Awaitable[Any]]) -> None:
        self._configuration = configuration
        self._load = load
        self._renewal = asyncio.Lock()
        self._last = ""

    async def header(self) -> str:
        from kubernetes.aio.config import ConfigException

        try:
            found = await self._configuration.get_api_key_with_prefix("BearerToken")
        except (OSError, ConfigException) as error:  # the last token remains valid for minutes
            log.error("token not read", extra={"error": str(error)})
            return self._last
        self._last = (found or "").strip()
        return self._last

    async def renew(self, refused: str) -> bool:
        async with self._renewal:
            if await self.header() != refused:
                return True
            try:
                self._configuration = await self._load()
            except ClusterNotConfigured as error:
                log.error("credentials not loaded", extra={"error": str(error)})
                return False
            return await self.header() != refused


async def _from_pod(directory: Path) -> ServerAccess:
    from kubernetes.aio.client import Configuration
    from kubernetes.aio.config import ConfigException, incluster_config

    async def load() -> Any:
        configuration = Configuration()
        loader = incluster_config.InClusterConfigLoader(str(directory / "token"), str(directory / "ca.crt"))
        try:
            loader.load_and_set(configuration)
        except (ConfigException, OSError) as error:
            raise ClusterNotConfigured(f"the service account of this pod is unusable: {error}") from None
        return configuration

    configuration = await load()
    try:
        namespace = (directory / "namespace").read_text().strip()
    except OSError:
        namespace = "default"
    return _access(configuration, load, namespace, proxy="")


async def _from_kubeconfig(paths: str, context: str | None) -> ServerAccess:
    from kubernetes.aio.client import Configuration
    from kubernetes.aio.config import ConfigException, load_kube_config
    from yaml import YAMLError

    if not _exists(paths):
        raise ClusterNotConfigured(f"the kubeconfig {paths} does not exist")

    async def load_both() -> tuple[Any, Any]:
        configuration = Configuration()
        loading = load_kube_config(paths, context, configuration, persist_config=False)
        try:
            loader = await asyncio.wait_for(loading, PLUGIN_S)
        except asyncio.TimeoutError:
            raise ClusterNotConfigured(f"the kubeconfig's plugin took longer than {PLUGIN_S:g} s") from None
        # The library does not check the file's structure. If the structure is wrong, any of these errors may
        # occur.
        except (
            ConfigException,
            YAMLError,
            OSError,
            ValueError,
            TypeError,
            KeyError,
            AttributeError,
        ) as error:
            raise ClusterNotConfigured(f"the kubeconfig {paths} is unusable: {error}") from None
        return configuration, loader

    async def load() -> Any:
        return (await load_both())[0]

    configuration, loader = await load_both()
    chosen = loader.current_context.get("context") or {}
    proxy = configuration.proxy or _proxy_of_environment(configuration.host)
    return _access(configuration, load, chosen.get("namespace") or "default", proxy)


def _exists(paths: str) -> bool:
    return any(Path(each).expanduser().is_file() for each in paths.split(os.pathsep) if each)


def _access(
    configuration: Any, load: Callable[[], Awaitable[Any]], namespace: str, proxy: str
) -> ServerAccess:
    url = configuration.host.rstrip("/")
    parts = urlsplit(url)
    if parts.scheme == "https":
        tls = _verifying(configuration)
    elif parts.scheme == "http" and _is_loopback(parts.hostname or ""):  # such as `kubectl proxy`
        tls = None
    else:
        raise ClusterNotConfigured(
            f"the API server's address {url!r} is neither https:// nor on this machine"
        )
    credentials = _LibraryCredentials(configuration, load)
    return ServerAccess(url, credentials, tls, namespace, configuration.tls_server_name or "", proxy)


def _verifying(configuration: Any) -> ssl.SSLContext:
    """Return a TLS context that verifies the server and presents the client certificate, if there is one."""
    if not configuration.verify_ssl:
        raise ClusterNotConfigured(
            "the kubeconfig sets insecure-skip-tls-verify, so any process that responds at that address would"
            " get the credentials: set the server's CA as certificate-authority-data instead"
        )
    try:
        context = ssl.create_default_context(
            cafile=configuration.ssl_ca_cert, cadata=configuration.ca_cert_data
        )
        if configuration.cert_file:
            context.load_cert_chain(configuration.cert_file, configuration.key_file)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise ClusterNotConfigured(
            f"the certificates for access to the API server are unusable: {error}"
        ) from None
    # Many clusters use a CA without an authority key identifier, which Python 3.13 refuses by default.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _proxy_of_environment(url: str) -> str:
    parts = urlsplit(url)
    host = parts.hostname or ""
    if _is_loopback(host) or urllib.request.proxy_bypass(host):
        return ""
    return urllib.request.getproxies().get(parts.scheme, "")

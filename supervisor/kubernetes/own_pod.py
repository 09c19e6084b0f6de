"""Read the identity of this process's pod, and get a certificate for the Service that it belongs to."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass

from supervisor.kubernetes import certificates
from supervisor.kubernetes.certificates import AuthoritySecret, ServerCertificate
from supervisor.kubernetes.client import PODS, ApiServer
from supervisor.kubernetes.errors import ApiError, NotFound

log = logging.getLogger(__name__)

START_TRIES = 30  # how often to try the first requests, `WAIT_S` apart: the API server may still be starting
WAIT_S = 1.0


@dataclass(frozen=True, slots=True)
class OwnPod:
    """The pod that this process runs in."""

    name: str
    namespace: str
    address: str
    uid: str = ""  # "" if the manifest does not pass it

    @classmethod
    def read(cls) -> OwnPod:
        """Read the pod from the variables that the kubelet has set. Raises `KeyError`."""
        return cls(
            os.environ["POD_NAME"],
            os.environ["POD_NAMESPACE"],
            os.environ["POD_IP"],
            os.environ.get("POD_UID", ""),
        )


async def is_gone(server: ApiServer, namespace: str, name: str, uid: str) -> bool:
    """Return True if the pod is known to have ended: it has finished, or no pod has its name and uid.

    Returns False for a pod without a name or a uid.

    After its pod is gone, a process that still runs on a lost node cannot change anything in the cluster,
    because its token is no longer valid.
    """
    if not (name and uid):  # a path without a name refers to the list of all pods
        return False
    try:
        pod = await server.get(PODS, name, namespace)
    except NotFound:
        return True
    except (ApiError, OSError):
        return False
    return pod["metadata"].get("uid") != uid or pod.get("status", {}).get("phase") in ("Succeeded", "Failed")


async def certificate_for(server: ApiServer, pod: OwnPod, names: Sequence[str]) -> ServerCertificate:
    """Return a certificate for `pod` when the API server responds. Raises the error of the last attempt."""
    for tries_left in reversed(range(START_TRIES)):
        try:
            return await certificates.server_certificate(
                AuthoritySecret(server, pod.namespace), names, (pod.address,)
            )
        except (ApiError, OSError) as error:
            if not tries_left:
                raise
            log.warning("no certificate yet", extra={"error": str(error)})
            await asyncio.sleep(WAIT_S)
    raise AssertionError("unreachable")


def service_names(service: str, namespace: str) -> tuple[str, ...]:
    """Return the DNS names of a Service, the full one first."""
    full = f"{service}.{namespace}.svc"
    return (full, f"{service}.{namespace}", service, f"{full}.cluster.local")

"""Ask a Deployment's other replicas which of them leads, without using the API server.

Only a leader whose term ends while the API server does not respond needs this (see `lease.lead`). If only
this process is cut off from the API server, another replica may have been elected.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence

import aiohttp

from supervisor.kubernetes.certificates import ServerCertificate

log = logging.getLogger(__name__)

PATH = "/v1/leader"
EPOCH = "epoch"  # the field of the response with the epoch of the responding replica; 0 if it does not lead
ASK_S = 2.0  # the limit for one response
MAX_REPLICAS = 16
MAX_BYTES = 1024  # the limit for a response


async def addresses_of(service: str) -> Sequence[str]:
    """Return the addresses of a headless Service's pods. Raises `OSError` if the name does not resolve."""
    found = await asyncio.get_running_loop().getaddrinfo(service, None, type=socket.SOCK_STREAM)
    return [str(each[4][0]) for each in found]


class Replicas:
    """Asks the other pods behind the headless Service of this process's pod."""

    def __init__(
        self,
        service: str,
        port: int,
        own_address: str,
        certificate: ServerCertificate,
        addresses: Callable[[str], Awaitable[Sequence[str]]] = addresses_of,
    ) -> None:
        """`service` is the Service's full DNS name, which the certificates of all replicas contain."""
        self._service, self._port, self._own = service, port, own_address
        self._certificate = certificate
        self._addresses = addresses

    async def rival(self, epoch: int) -> str:
        """Return the address of a replica that leads with an epoch above `epoch`; "" if there is none.

        This takes at most 2 x `ASK_S`. A replica that does not respond within that time does not count as a
        rival.
        """
        try:
            found = await asyncio.wait_for(self._addresses(self._service), ASK_S)
        except (OSError, asyncio.TimeoutError) as error:
            log.info("replicas not found", extra={"error": str(error)})
            return ""
        others = [each for each in dict.fromkeys(found) if each != self._own][:MAX_REPLICAS]
        epochs = await asyncio.gather(*map(self._epoch, others))
        return next((other for other, its in zip(others, epochs, strict=True) if its > epoch), "")

    async def _epoch(self, address: str) -> int:
        """Return the epoch of the replica at `address`; 0 if it does not lead or does not answer."""
        host = f"[{address}]" if ":" in address else address
        verify = ssl.create_default_context(cadata=self._certificate.bundle)
        limit = aiohttp.ClientTimeout(total=ASK_S)
        try:
            async with (
                aiohttp.ClientSession(timeout=limit) as session,
                session.get(
                    f"https://{host}:{self._port}{PATH}",
                    ssl=verify,
                    server_hostname=self._service,
                    allow_redirects=False,
                ) as answer,
            ):
                text = await answer.content.read(MAX_BYTES)
            epoch = json.loads(text)[EPOCH] if answer.status == 200 else 0
        except (
            aiohttp.ClientError,
            OSError,
            asyncio.TimeoutError,
            ValueError,
            LookupError,
            TypeError,
        ) as error:
            log.info("replica not asked", extra={"address": address, "error": str(error)})
            return 0
        return epoch if type(epoch) is int else 0

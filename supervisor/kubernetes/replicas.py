"""Ask a Deployment's other replicas which of them leads, without using the API server.

Two kinds of replicas ask. If a leader's term ends while the API server does not respond, the leader asks
whether there is a rival (see `leadership.lead`), because it may be the only process that cannot reach the
server. A replica that waits for the lease asks whether the leader's process has ended, to avoid waiting until
the lease expires.

The process has ended for certain if nothing listens on the address at which the leader was found, if another
process answers there, or if the pod no longer exists. A leader that is merely silent may be healthy, so its
lease must expire. If its host does not answer at all, the lease may be taken over early
(`lease.EarlyTakeover`). A stopped process is not such a case, because its kernel still answers.

One error remains possible: the network may refuse connections to a healthy process. This
error is harmless, because the former leader finds its lease taken at its next renewal, a second later. Until
then, its orders and records have a lower epoch than the new leader's, and each of its other requests is
conditional on the object that it has seen. The exception is a job that it takes over during this second: see
docs/adr/0020.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import aiohttp

from holdfast.process.network import NO_ANSWER, UNUSED_PORT
from supervisor.kubernetes.certificates import ServerCertificate

log = logging.getLogger(__name__)

PATH = "/v1/leader"
EPOCH = "epoch"  # the field of the response with the epoch of the responding replica; 0 if it does not lead
HOLDER = "holder"  # the field with the holder's name in the replica's lease; "" if it does not lead
ASK_S = 1.0  # how long to wait for one response
AGAIN_S = 0.5  # the time between two searches for a leader, or two checks of a silent one
LATE_S = 0.2  # if this process notices the end of a probe this late, it may also have missed the answer
MAX_OPEN_S = 20.0  # a connection that is still open after this time may be half open
MAX_REPLICAS = 16
MAX_BYTES = 1024  # the maximum size of a response


async def addresses_of(service: str) -> Sequence[str]:
    """Return the addresses of a headless Service's pods. Raises `OSError` if the name does not resolve."""
    found = await asyncio.get_running_loop().getaddrinfo(service, None, type=socket.SOCK_STREAM)
    return [str(each[4][0]) for each in found]


@dataclass(frozen=True, slots=True)
class _Answer:
    """What a replica states about itself."""

    epoch: int = 0  # 0 if it does not lead
    holder: str = ""


class Replicas:
    """Asks the other pods behind the headless Service of this process's pod."""

    def __init__(
        self,
        service: str,
        port: int,
        own_address: str,
        certificate: ServerCertificate,
        addresses: Callable[[str], Awaitable[Sequence[str]]] = addresses_of,
        pod_is_gone: Callable[[str], Awaitable[bool]] | None = None,
        unused_port: int = UNUSED_PORT,
    ) -> None:
        """`service` is the Service's full DNS name, which the certificates of all replicas contain.

        `pod_is_gone` returns True if the pod of the given lease holder is known to have ended. On
        `unused_port`, no replica listens.
        """
        self._unused_port = unused_port
        self._service, self._port, self._own = service, port, own_address
        self._certificate = certificate
        self._addresses = addresses
        self._pod_is_gone = pod_is_gone
        # the last error that was logged for each address; the key "" stands for the Service
        self._noted: dict[str, str] = {}
        self._leader = ("", "")  # the last holder of the lease that was found, and its address

    async def rival(self, epoch: int) -> str:
        """Return the address of a replica that leads with an epoch above `epoch`; "" if there is none.

        This takes at most 2 x `ASK_S`. A replica that does not respond within that time is not considered a
        rival.
        """
        answers = await self._ask_all()
        return next((address for address, its in answers.items() if its.epoch > epoch), "")

    async def end_of(self, holder: str) -> str:
        """Wait until the process that holds the lease as `holder` is known to have ended. Return the reason.

        While the leader is healthy, this costs one request every few seconds. It keeps a connection open
        without sending anything, and the connection ends when the process does.
        """
        address = ""
        while True:
            if not address:
                answers = await self._ask_all()
                address = next((each for each, its in answers.items() if its.holder == holder), "")
                self._leader = (holder, address)
            elif why := await self._why_ended(address, holder):
                return why
            if self._pod_is_gone is not None and not address and await self._pod_is_gone(holder):
                return "its pod has ended"
            await asyncio.sleep(AGAIN_S)

    async def answers(self, holder: str, limit_s: float) -> bool | None:
        """Return whether the host of the process that holds the lease as `holder` answers within `limit_s`.

        Two ports are tried, because the kernel drops connections to a port whose process is stopped once its
        queue is full. It refuses a connection to a port on which nothing listens at any time, and a refusal
        is an answer. If the network drops connections to that port, only the other one shows anything.

        Returns None if this is unknown, for example because the leader was never found. Never raises.
        """
        found, address = self._leader
        if found != holder or not address:
            return None
        until_s = time.monotonic() + limit_s
        ports = (self._port, self._unused_port)
        answers = await asyncio.gather(*(_answers(address, port, until_s) for port in ports))
        if True in answers:
            return True
        return None if None in answers else False

    async def _ask_all(self) -> Mapping[str, _Answer]:
        """Return the answer of each other replica that has answered, by its address."""
        try:
            found = await asyncio.wait_for(self._addresses(self._service), ASK_S)
        except (OSError, asyncio.TimeoutError) as error:
            self._note("", str(error))
            return {}
        self._note("", "")
        others = [each for each in dict.fromkeys(found) if each != self._own][:MAX_REPLICAS]
        answers = await asyncio.gather(*map(self._ask, others), return_exceptions=True)
        return {other: its for other, its in zip(others, answers, strict=True) if isinstance(its, _Answer)}

    async def _why_ended(self, address: str, holder: str) -> str:
        """Wait for news of the process at `address`. Return why `holder` has ended; "" if it may not have."""
        await self._until_closed(address)
        return await self._why_ended_now(address, holder)

    async def _why_ended_now(self, address: str, holder: str) -> str:
        try:
            answer = await self._ask(address)
        except ConnectionRefusedError:
            return f"nothing listens on {address}"
        except OSError:
            gone = self._pod_is_gone is not None and await self._pod_is_gone(holder)
            return "its pod has ended" if gone else ""
        return "" if answer.holder == holder else f"the process on {address} does not hold the lease"

    async def _until_closed(self, address: str) -> None:
        """Return when a connection to `address` ends or is refused, or has been open for `MAX_OPEN_S`.

        This connection does not use TLS, because nothing is sent on it. The replica soon closes it.
        """
        try:
            connecting = asyncio.open_connection(address, self._port)
            reader, writer = await asyncio.wait_for(connecting, ASK_S)
        except (OSError, asyncio.TimeoutError):
            return
        try:
            await asyncio.wait_for(reader.read(1), MAX_OPEN_S)
        except (OSError, asyncio.TimeoutError):
            return
        finally:
            writer.close()

    async def _ask(self, address: str) -> _Answer:
        """Return the answer of the replica at `address`.

        Raises `ConnectionRefusedError` if nothing listens there, and another `OSError` if nothing answers.
        """
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
                ) as response,
            ):
                text = await response.content.read(MAX_BYTES)
            answer = json.loads(text) if response.status == 200 else {}
            epoch, holder = answer[EPOCH], answer.get(HOLDER, "")
        except (
            aiohttp.ClientError,
            OSError,
            asyncio.TimeoutError,
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
        ) as error:
            self._note(address, str(error) or "no answer in time")
            if isinstance(getattr(error, "os_error", None), ConnectionRefusedError):
                raise ConnectionRefusedError(str(error)) from None
            raise OSError(f"no answer from {address}: {error}") from None
        self._note(address, "")
        return _Answer(epoch if type(epoch) is int else 0, holder if isinstance(holder, str) else "")

    def _note(self, address: str, error: str) -> None:
        """Log an error once, because a replica that waits for the lease asks repeatedly."""
        if error and self._noted.get(address) != error:
            what = "replica not asked" if address else "replicas not found"
            log.info(what, extra={"address": address or self._service, "error": error})
        self._noted[address] = error
        if len(self._noted) > 2 * MAX_REPLICAS:
            self._noted.clear()


async def _answers(address: str, port: int, until_s: float) -> bool | None:
    """Return whether the host answers an attempt to connect to a port; None if this is unknown."""
    connecting = asyncio.ensure_future(asyncio.open_connection(address, port))
    # If the caller is cancelled, nobody else looks at the error, and asyncio would log it.
    connecting.add_done_callback(lambda done: None if done.cancelled() else done.exception())
    try:
        await asyncio.wait({connecting}, timeout=max(0.0, until_s - time.monotonic()))
    finally:
        if not connecting.done():
            connecting.cancel()
            await asyncio.wait({connecting})
    if connecting.cancelled():
        return False if time.monotonic() < until_s + LATE_S else None
    error = connecting.exception()
    if error is None:
        connecting.result()[1].close()
        return True
    if isinstance(error, ConnectionError):  # refused or reset
        return True
    return False if isinstance(error, OSError) and error.errno in NO_ANSWER else None

"""Answer as a replica of the supervisor that holds the lease as HOLDER, until killed.

python -m tests.unit.supervisor.kubernetes.leaders.replica CHAIN ADDRESS PORT HOLDER EPOCH

CHAIN is a PEM file with the key and the certificate. Prints a line once it listens. With the holder "old",
the answer is that of an earlier version, which did not name its holder.
"""

from __future__ import annotations

import asyncio
import ssl
import sys

from aiohttp import web

from supervisor.kubernetes.replicas import EPOCH, HOLDER, PATH


async def main(chain: str, address: str, port: str, holder: str, epoch: str) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(chain)

    async def answer(_: web.Request) -> web.Response:
        said: dict[str, object] = {EPOCH: int(epoch)}
        return web.json_response(said if holder == "old" else {**said, HOLDER: holder})

    app = web.Application()
    app.router.add_get(PATH, answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, address, int(port), ssl_context=context, reuse_address=True).start()
    sys.stdout.write("listens\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))

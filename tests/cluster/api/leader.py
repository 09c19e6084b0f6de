"""Contend for the lease that the arguments name, and print one line for each event.

python -m tests.cluster.api.leader NAMESPACE IDENTITY
"""

from __future__ import annotations

import asyncio
import sys

from supervisor.kubernetes.client import connect
from supervisor.kubernetes.leadership import Leadership, lead
from supervisor.kubernetes.lease import LeaseLock, LeaseLost, LeaseTerms

TERMS = LeaseTerms(duration_s=4, deadline_s=2.5, retry_s=0.5)


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


async def main(namespace: str, identity: str) -> None:
    async with await connect() as api:
        lock = LeaseLock(api, namespace, "leader", identity, TERMS)

        async def body(term: Leadership) -> None:
            say(f"leads {term.epoch}")
            try:
                while True:
                    await asyncio.sleep(0.1)
                    if term.left_s <= 0:
                        say("is late")
            finally:
                say("ends")

        try:
            await lead(lock, body)
        except LeaseLost as error:
            say(f"lost: {error}")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))

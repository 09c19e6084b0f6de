"""Replicas create one certificate authority together, in a real Secret."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta, timezone

import pytest

from supervisor.kubernetes.certificates import SECRETS, AuthoritySecret, bundle, server_certificate
from supervisor.kubernetes.client import ApiServer, connect

pytestmark = pytest.mark.cluster


async def test_replicas_that_race_agree_on_an_authority_and_on_its_successor(
    api: ApiServer, namespace: str
) -> None:
    def later() -> datetime:
        return datetime.now(timezone.utc) + timedelta(days=2000)

    replicas = [await connect() for _ in range(8)]
    try:
        first = await asyncio.gather(*(AuthoritySecret(each, namespace).load() for each in replicas))
        then = await asyncio.gather(
            *(AuthoritySecret(each, namespace, now=later).load() for each in replicas)
        )
    finally:
        for each in replicas:
            await each.close()
    assert len({bundle(each) for each in first}) == 1
    assert len({bundle(each) for each in then}) == 1
    assert [len(first[0]), len(then[0])] == [1, 2]
    assert bundle(then[0]).startswith(bundle(first[0]))
    assert (await api.get(SECRETS, "holdfast-ca", namespace))["type"] == "Opaque"


async def test_a_certificate_is_made_from_a_real_secret_and_made_again_after_its_deletion(
    api: ApiServer, namespace: str
) -> None:
    changes: list[str] = []
    secret = AuthoritySecret(api, namespace)
    made = await server_certificate(secret, ["x"], bundle_changed=changes.append)
    await made.check()
    assert len(changes) == 1
    await api.delete(SECRETS, "holdfast-ca", namespace)
    await made.check()
    assert len(changes) == 2

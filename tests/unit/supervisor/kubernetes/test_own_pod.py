"""A process knows its own pod, and gets a certificate as soon as the API server answers."""

from __future__ import annotations

import ssl

import pytest

from supervisor.kubernetes import own_pod
from supervisor.kubernetes.errors import ApiError, ServerUnreachable
from supervisor.kubernetes.own_pod import OwnPod, certificate_for, service_names
from tests.unit.supervisor.cluster.api_server import ServedObjects

ME = OwnPod("supervisor-1", "holdfast-system", "10.0.0.9")
NAMES = service_names("holdfast-supervisor", ME.namespace)
VARIABLES = {"POD_NAME": ME.name, "POD_NAMESPACE": ME.namespace, "POD_IP": ME.address}


def test_a_service_has_its_full_name_first() -> None:
    assert NAMES == (
        "holdfast-supervisor.holdfast-system.svc",
        "holdfast-supervisor.holdfast-system",
        "holdfast-supervisor",
        "holdfast-supervisor.holdfast-system.svc.cluster.local",
    )


def test_the_pod_of_this_process_is_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    assert OwnPod.read() == ME


@pytest.mark.parametrize("missing", VARIABLES)
def test_outside_of_a_pod_the_missing_variable_is_named(
    monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(missing)
    with pytest.raises(KeyError, match=missing):
        OwnPod.read()


async def test_the_certificate_is_created_once_the_api_server_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(own_pod, "WAIT_S", 0.001)
    served = ServedObjects()
    async with served.serving() as server:
        served.faults = [503, 403, None]
        made = await certificate_for(server, ME, NAMES)
        assert "BEGIN CERTIFICATE" in made.bundle
        assert isinstance(made.context, ssl.SSLContext)
        again = await certificate_for(server, ME, NAMES)
        assert again.bundle == made.bundle, "all replicas must share one authority"


@pytest.mark.parametrize(("code", "kind"), [(403, ApiError), (503, ServerUnreachable)])
async def test_a_lasting_refusal_ends_the_process(
    monkeypatch: pytest.MonkeyPatch, code: int, kind: type[Exception]
) -> None:
    monkeypatch.setattr(own_pod, "WAIT_S", 0.001)
    monkeypatch.setattr(own_pod, "START_TRIES", 3)
    served = ServedObjects()
    async with served.serving() as server:
        served.broken["secrets"] = code
        with pytest.raises(kind):
            await certificate_for(server, ME, NAMES)

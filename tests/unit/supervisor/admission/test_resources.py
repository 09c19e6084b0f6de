from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest

from supervisor.admission import resources
from supervisor.admission.resources import GI, MI
from tests.unit.supervisor.admission.pods import container
from tests.unit.supervisor.admission.pods import resources as amounts

FULL = amounts({"cpu": "4", "memory": "16Gi"}, {"cpu": "4000m", "memory": "16384Mi"})


@pytest.mark.parametrize(
    ("text", "number"),
    [("500m", Fraction(1, 2)), ("4Gi", 4 * GI), ("1.5Gi", 3 * GI // 2), (2, 2), (0.25, Fraction(1, 4)),
     ("1e3", 1000), ("1E", 10**18), ("2k", 2000), ("100n", Fraction(1, 10**7)), (".5", Fraction(1, 2)),
     ("5.", 5), ("-1", -1), ("1E2", 100)],
)  # fmt: skip
def test_a_quantity_is_read_as_kubernetes_reads_it(text: object, number: Fraction) -> None:
    assert resources.quantity(text) == number


@pytest.mark.parametrize("text", ["", "4GB", "1 Gi", "Gi", "1e999", True, None, [], "0x10", "9" * 99])
def test_other_texts_are_not_quantities(text: object) -> None:
    with pytest.raises(ValueError, match="is not a quantity such as 500m or 4Gi"):
        resources.quantity(text)


@pytest.mark.parametrize(
    ("count", "text"),
    [(10 * GI, "10Gi"), (10304 * MI, "10304Mi"), (3 << 10, "3Ki"), (1000, "1000"), (0, "0")],
)
def test_a_size_is_written_as_the_api_server_writes_it(count: int, text: str) -> None:
    assert resources.size(count) == text


def test_the_memory_volume_has_room_for_two_snapshots_of_the_given_state() -> None:
    assert resources.volume_bytes(4 * GI, 100 * GI) == 10 * GI + 64 * MI
    assert resources.volume_bytes(1, None) == 65 * MI  # whole MiB


def test_if_the_size_of_the_state_is_unknown_snapshots_may_take_half_of_the_limit() -> None:
    assert resources.volume_bytes(None, 16 * GI) == 8 * GI
    assert resources.volume_bytes(None, 3 * MI) == MI
    assert resources.volume_bytes(None, None) == 2 * GI


def test_the_limit_of_a_container_is_its_own_or_the_pods() -> None:
    pod = {"resources": amounts({"memory": "2Gi"})}
    assert resources.memory_limit({"resources": amounts({"memory": "1Gi"})}, pod) == GI
    assert resources.memory_limit({}, pod) == 2 * GI
    assert resources.memory_limit({"resources": {"limits": None}}, {}) is None


def own(*of: dict[str, Any], **spec: Any) -> resources.OwnResources:
    return resources.own_resources([container(resources=each) for each in of], spec, 8 * GI)


def test_a_guaranteed_pod_stays_guaranteed_and_the_sidecar_has_the_volumes_memory() -> None:
    found = own(FULL, amounts({"cpu": 1, "memory": "1Gi"}))  # the API server requests what is limited
    assert found.guaranteed
    assert found.sidecar["requests"] == found.sidecar["limits"] == {"cpu": "900m", "memory": "8704Mi"}
    assert found.setup["requests"] == found.setup["limits"] == {"cpu": "900m", "memory": "512Mi"}


def test_the_sidecar_does_not_reserve_a_core() -> None:
    assert resources.quantity(own(FULL).sidecar["limits"]["cpu"]).denominator != 1


def test_where_limits_exceed_requests_the_sidecar_requests_little() -> None:
    found = own(amounts({"cpu": "4", "memory": "16Gi"}, {"cpu": "1", "memory": "16Gi"}))
    assert not found.guaranteed
    assert found.sidecar["requests"] == {"cpu": "100m", "memory": "128Mi"}
    assert found.sidecar["limits"] == {"cpu": "900m", "memory": "8704Mi"}


def test_a_resource_is_set_only_if_all_containers_set_it() -> None:
    found = own(amounts({"memory": "16Gi"}, {"cpu": "1", "memory": "1Gi"}), amounts(None, {"cpu": "1"}))
    assert found.sidecar == {"requests": {"cpu": "100m"}}
    assert found.setup == {"requests": {"cpu": "100m"}}


def test_a_quota_of_ephemeral_storage_is_also_met() -> None:
    with_scratch = amounts({"ephemeral-storage": "1Gi"})
    assert own(with_scratch).sidecar == {
        "limits": {"ephemeral-storage": "256Mi"},
        "requests": {"ephemeral-storage": "64Mi"},
    }


@pytest.mark.parametrize("of", [{}, amounts({}, {}), amounts({"nvidia.com/gpu": 8}), amounts({"cpu": "0"})])
def test_a_best_effort_pod_stays_best_effort(of: dict[str, Any]) -> None:
    assert own(of) == resources.OwnResources({}, {}, guaranteed=False)


def test_with_pod_level_resources_holdfasts_containers_set_none() -> None:
    assert own(FULL, resources=amounts({"memory": "32Gi"})).sidecar == {}
    assert own(FULL, resources={"requests": {}}).guaranteed


@pytest.mark.parametrize("of", [amounts({"cpu": "x"}), {"limits": "much"}, "much"])
def test_resources_that_kubernetes_would_not_accept_are_an_error(of: Any) -> None:
    with pytest.raises(ValueError, match="is not"):
        own(of)

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.model import MAX_FACTS, MAX_TEXT, Observation, gpu_entity, normalized_pci, origin_of


@pytest.mark.parametrize("text", ["00000000:3B:00.0", "0000:3b:00", "PCI:0000:3b:00", "3b:00.0", "0:3b:0"])
def test_a_gpu_has_one_entity_in_every_notation_of_its_address(text: str) -> None:
    assert gpu_entity(text) == "gpu/0000:3b:00.0"


@given(st.text())
def test_text_that_is_not_an_address_is_returned_unchanged(text: str) -> None:
    assert normalized_pci(normalized_pci(text)) == normalized_pci(text)


def test_the_text_of_a_sensor_is_bounded() -> None:
    seen = Observation(
        0.0, "xid", "gpu/x", "kmsg", text="x" * 9000, facts=tuple(("a", "b") for _ in range(99))
    )
    assert (len(seen.text), len(seen.facts)) == (MAX_TEXT, MAX_FACTS)


@pytest.mark.parametrize(
    ("source", "entity", "is_sample", "origin"),
    [
        ("agent", "sensor/nvml-polling", True, "driver state"),
        ("agent", "sensor/nvml-events", True, "driver state"),
        ("agent", "sensor/host", True, "host"),
        ("nvml-events", "gpu/0000:3b:00.0", True, "driver state"),
        ("kmsg", "gpu/0000:3b:00.0", False, "driver log"),
        ("kmsg", "disk/sda", False, "kernel"),
        ("a newer sensor", "gpu/0000:3b:00.0", True, "a newer sensor"),
    ],
)
def test_the_origin_of_evidence_is_what_the_sensor_relies_on(
    source: str, entity: str, is_sample: bool, origin: str
) -> None:
    assert origin_of(source, entity, is_sample) == origin

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.model import (
    MAX_FACTS,
    MAX_TEXT,
    Observation,
    amount,
    gpu_entity,
    normalized_pci,
    origin_of,
)
from nodeagent.policy.loading import shipped
from nodeagent.policy.rules import RuleKind


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


@pytest.mark.parametrize(
    ("number", "things", "text"),
    [
        (1, "links", "1 link"),
        (1.0, "uncorrected, non-fatal PCIe errors", "1 uncorrected, non-fatal PCIe error"),
        (1, "NVLink replays, recoveries and CRC errors", "1 NVLink replay, recovery or CRC error"),
        (1, "processes", "1 process"),
        (1, "%", "1 %"),
        (1, "", "1"),
        (0, "links", "0 links"),
        (2, "buffer overruns and errors", "2 buffer overruns and errors"),
        (1.5, "times", "1.5 times"),
    ],
)
def test_the_singular_is_used_for_exactly_one(number: float, things: str, text: str) -> None:
    assert amount(number, things) == text


def test_every_counted_noun_of_the_shipped_policy_has_a_singular() -> None:
    for rule in shipped().rules.values():
        for things in (rule.unit, rule.what if rule.kind is RuleKind.RATE else ""):
            if len(things) > 1 and things != "°C":
                assert amount(1, things) != f"1 {things}", things

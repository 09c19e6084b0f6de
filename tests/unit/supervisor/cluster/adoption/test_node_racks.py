from __future__ import annotations

import pytest

from supervisor.cluster.adoption.node_racks import RACK_LABELS, rack_labels, rack_of

RACK, ZONE = RACK_LABELS


@pytest.mark.parametrize(
    ("labels", "rack"),
    [
        ({}, ""),
        ({ZONE: "z1"}, "z1"),
        ({ZONE: "z1", RACK: "r1"}, "r1"),
        ({ZONE: "z1", RACK: ""}, "z1"),
        ({ZONE: None, RACK: 3}, ""),
    ],
)
def test_a_node_is_in_the_rack_that_its_most_precise_label_names(
    labels: dict[str, object], rack: str
) -> None:
    assert rack_of(labels) == rack


def test_an_operator_can_name_other_labels() -> None:
    names = rack_labels(" example.com/switch, ,example.com/row")
    assert names == ("example.com/switch", "example.com/row")
    assert rack_of({"example.com/row": "7", ZONE: "z1"}, names) == "7"
    assert rack_labels(" ") == RACK_LABELS

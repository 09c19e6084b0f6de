"""The record of a decision: JSON in the order of the fields, without parts of other fields."""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import pytest

from holdfast.journal_fields import UNRECORDED
from holdfast.protocol import codec
from holdfast.protocol.member_messages import StorageListing
from supervisor.store.recorded import recorded
from supervisor.view.model import GroupSize, JobState, OpenIncident, View
from tests.unit.supervisor.job_views import fault, launcher, member, memory, rank, report, view


@dataclass(frozen=True, slots=True)
class RecordedPart:
    number: int
    hidden: str = field(default="", metadata=UNRECORDED)


@pytest.mark.parametrize("value", [None, True, 3, 0.5, "text"])
def test_a_plain_value_is_recorded_unchanged(value: object) -> None:
    assert recorded(value) is value


def test_dataclasses_and_collections_become_json_at_any_depth() -> None:
    found = recorded({"a": (RecordedPart(1, "x"), [RecordedPart(2)]), "b": MappingProxyType({"c": ()})})
    assert found == {"a": [{"number": 1}, [{"number": 2}]], "b": {"c": []}}
    assert recorded(OrderedDict(z=1, a=2)) == {"z": 1, "a": 2}
    unrecorded = (
        "bystanders",
        "completion",
        "reduced_by",
        "sizes",
        "resizable",
        "joined",
        "dropped",
        "untried",
        "asked",
        "save_tries",
    )
    assert list(recorded(memory())) == [each for each in JobState.__slots__ if each not in unrecorded]


def test_a_field_that_few_runs_need_is_only_recorded_with_another_value_than_its_default() -> None:
    state = memory(reduced_by=1, sizes=(GroupSize(2, 1, (1,), 5),), resizable=True)
    found = json.loads(json.dumps(recorded(state)))
    assert found["sizes"] == [{"generation": 2, "members": 1, "carried": [1], "at_ns": 5}]
    assert {*found} - {*recorded(memory())} == {"reduced_by", "sizes", "resizable"}
    assert codec.from_json(JobState, found) == state


def test_a_part_of_another_field_is_neither_recorded_nor_compared() -> None:
    incident = OpenIncident(1, 1, 5, 6, 0.0, (fault("hang", hung="in a barrier"),), measure="a part")
    state = memory(incident=incident)
    found = json.loads(json.dumps(recorded(state)))
    assert "measure" not in found["incident"]
    assert "hung" not in found["incident"]["faults"][0]
    assert codec.from_json(JobState, found) == state


def test_the_storage_listing_of_a_view_is_not_recorded() -> None:
    """The decision takes the storage from the index. A copy in each report would only make lines longer."""
    told = report("m0", launcher(rank(0)), storage=StorageListing(7))
    seen = view(member("m0", told))
    found = codec.from_json(View, json.loads(json.dumps(recorded(seen))))
    assert found.members[0].report == replace(told, storage=None)

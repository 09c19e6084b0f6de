from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nodeagent.sysfs.pci import WIDTHS, best_width, full_width, remembered_widths, width_share


def test_a_link_is_compared_with_the_best_width_seen() -> None:
    assert width_share(8, full_width(best_width(8, 16, 16), 16, [])) == 0.5
    assert width_share(16, full_width(best_width(16, None, 16), 16, [])) == 1.0


def test_a_slot_with_fewer_lanes_than_its_port_claims_is_not_a_fault() -> None:
    assert width_share(8, full_width(best_width(8, None, 16), 16, [])) == 1.0


def test_other_devices_of_the_model_determine_the_full_width() -> None:
    assert width_share(8, full_width(8, 16, [16, 16, 8])) == 0.5


def test_a_card_in_a_narrower_slot_is_not_compared_with_those_in_wide_ones() -> None:
    assert width_share(8, full_width(8, 8, [16, 16])) == 1.0


def test_a_width_remembered_from_a_wider_slot_is_limited() -> None:
    assert best_width(8, 16, 8) == 8


def test_widths_that_mean_no_link_are_ignored() -> None:
    for width in (None, 0, 63, 255, -1):
        assert width_share(width, 16) is None
        assert best_width(width, None, 16) is None
    assert width_share(8, None) is None


def test_corrupt_remembered_data_is_ignored() -> None:
    assert remembered_widths({"a": 16, "b": "16", 3: 8, "c": 7, "d": None, "e": 4.5}) == {"a": 16}


WIDTH = st.one_of(st.none(), st.integers(-1, 300), st.sampled_from(sorted(WIDTHS)))


@given(
    WIDTH, WIDTH, st.one_of(st.none(), st.sampled_from(sorted(WIDTHS))), st.lists(st.sampled_from([1, 8, 16]))
)
def test_a_share_never_exceeds_one(
    now: int | None, before: int | None, most: int | None, alike: list[int]
) -> None:
    found = width_share(now, full_width(best_width(now, before, most), most, alike))
    assert found is None or 0 < found <= 1

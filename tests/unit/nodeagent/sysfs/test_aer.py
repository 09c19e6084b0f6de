from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nodeagent.sysfs.pci import aer_total


def test_the_total_counts_messages_and_takes_precedence() -> None:
    assert aer_total(b"RxErr 3\nBadTLP 4\nTOTAL_ERR_COR 5\n") == 5
    assert aer_total(b"Undefined 0\nTOTAL_ERR_FATAL 0\n") == 0


def test_without_a_total_the_errors_are_summed() -> None:
    assert aer_total(b"RxErr 3\nBad TLP 4\n") == 7


def test_malformed_counts_have_no_value() -> None:
    for raw in (b"", b"N/A", b"RxErr -1", b"RxErr " + b"9" * 30, b"5\n"):
        assert aer_total(raw) is None


LINE = st.sampled_from([b"RxErr 1", b"TOTAL_ERR_COR 3", b"TOTAL_ERR_COR x", b" 5", b"\xff 7", b""])


@given(st.one_of(st.binary(max_size=100), st.lists(LINE).map(b"\n".join)))
def test_no_bytes_make_the_parser_of_aer_totals_raise(raw: bytes) -> None:
    found = aer_total(raw)
    assert found is None or found >= 0

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nodeagent.kernel.kmsg import MAX_FIELDS, KmsgRecord, parse_record, record_sequence
from tests.unit.nodeagent.kernel.growth import growth


def test_a_record_has_facility_priority_sequence_and_time() -> None:
    found = parse_record(b"6,339,5140900,-;NET: Registered PF_INET6 protocol family\n")
    assert found == KmsgRecord(0, 6, 339, 5.1409, "NET: Registered PF_INET6 protocol family")


def test_the_facility_of_a_record_from_user_space_is_not_the_kernels() -> None:
    found = parse_record(b"12,342,4531390220,-;NVRM: Xid (PCI:0000:3b:00): 79\n")
    assert found is not None
    assert (found.facility, found.priority) == (1, 4)


def test_further_fields_and_lines_are_accepted_before_and_after_the_text() -> None:
    found = parse_record(
        b"4,160,1424,-,caller=T123,later=thing;pci_root PNP0A03:00: host bridge; 2 windows\n"
        b" SUBSYSTEM=acpi\n DEVICE=+acpi:PNP0A03:00\n"
    )
    assert found is not None
    assert found.text == "pci_root PNP0A03:00: host bridge; 2 windows"
    assert found.fields == (("SUBSYSTEM", "acpi"), ("DEVICE", "+acpi:PNP0A03:00"))


def test_escaped_characters_are_restored() -> None:
    found = parse_record(b"3,1,1,-;NVRM: The NVIDIA GPU\\x0aNVRM: C:\\x5cx41 \\xc3\\xa9 \\xff\n")
    assert found is not None
    assert found.text == "NVRM: The NVIDIA GPU\nNVRM: C:\\x41 é �"


@pytest.mark.parametrize(
    "raw", [b"", b"\n", b";", b"6,1;x", b"x,1,2,-;y", b"6,1,2;y", b" 6,1,2,-;y", b"6,-1,2,-;y"]
)
def test_a_malformed_record_is_refused(raw: bytes) -> None:
    assert parse_record(raw) is None


@given(st.binary(max_size=300))
@example(b"999999999,99999999999999999999,99999999999999999999,-;\\x")
@example(b"6,1,2,-;text\n=\n =\n KEY\n KEY=\\x0")
def test_no_bytes_make_the_parser_of_kmsg_records_raise(raw: bytes) -> None:
    found = parse_record(raw)
    assert found is None or len(found.fields) <= MAX_FIELDS


@given(st.text(max_size=200).filter(lambda t: "\n" not in t), st.binary(max_size=100))
def test_no_record_makes_the_sequence_parser_raise(text: str, rest: bytes) -> None:
    assert parse_record(b"6,1,2,-;" + text.encode("utf-8", "surrogatepass") + b"\n" + rest) is not None


@pytest.mark.parametrize("body", [b",", b"6,", b"-;", b"\\x", b"\\x4", b"\n =", b"a=", b"6,1,2,-"])
def test_hostile_records_are_parsed_in_linear_time(body: bytes) -> None:
    for head in (b"", b"6,1,2,", b"6,1,2,-;"):
        whole = head + body * (65536 // len(body))
        assert growth(partial(_parse, whole), 8192, 65536) < 24  # quadratic would be 64


def _parse(raw: bytes, length: int) -> None:
    parse_record(raw[:length])


@given(st.binary(max_size=60) | st.from_regex(rb"\d{0,4},\d{0,25},\d{0,4},[-,c]{0,3};?.{0,9}"))
def test_the_sequence_number_parsed_alone_equals_that_of_the_whole_record(raw: bytes) -> None:
    whole = parse_record(raw)
    assert record_sequence(raw) == (None if whole is None else whole.seq)

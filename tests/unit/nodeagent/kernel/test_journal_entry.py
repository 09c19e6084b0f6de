from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.kernel.journal import JournalEntry, parse_entry

LINE = {
    "__CURSOR": "s=0d1;i=2a;b=5a7c1e5e9d0e4b57a0a50b1f8c5d2a11;m=1e240;t=5f;x=1",
    "__REALTIME_TIMESTAMP": "1700000000000000",
    "__MONOTONIC_TIMESTAMP": "123456789",
    "_BOOT_ID": "5a7c1e5e9d0e4b57a0a50b1f8c5d2a11",
    "_TRANSPORT": "kernel",
    "SYSLOG_FACILITY": "0",
    "PRIORITY": "3",
    "MESSAGE": "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.",
}


def read(**changed: object) -> JournalEntry | None:
    return parse_entry(json.dumps({**LINE, **changed}).encode())


def test_an_entry_has_the_fields_of_a_record_and_a_cursor() -> None:
    assert read() == JournalEntry(
        LINE["__CURSOR"], "5a7c1e5e9d0e4b57a0a50b1f8c5d2a11", 0, 3, 123.456789, LINE["MESSAGE"]
    )


def test_a_message_that_is_not_plain_text_is_a_list_of_bytes() -> None:
    found = read(MESSAGE=list(b"a\x1b\xff"))
    assert found is not None
    assert found.text == "a\x1b�"


@pytest.mark.parametrize("transport", ["syslog", "journal", "stdout", "driver", None])
def test_an_entry_that_is_not_of_the_kernel_log_is_ignored(transport: str | None) -> None:
    assert read(_TRANSPORT=transport) is None


def test_an_entry_that_a_program_wrote_to_the_kernel_log_has_another_facility() -> None:
    found, unsaid = (
        read(SYSLOG_FACILITY="1"),
        parse_entry(json.dumps({k: v for k, v in LINE.items() if k != "SYSLOG_FACILITY"}).encode()),
    )
    assert found is not None
    assert unsaid is not None
    assert found.facility == unsaid.facility == 1


@pytest.mark.parametrize(
    "line",
    [
        b"", b"{", b"null", b"[]", b"3", b"\xff\xfe", b"-- No entries --", b"[" * 100_000, b'{"a":' * 100_000,
        json.dumps({**LINE, "MESSAGE": None}).encode(),
        json.dumps({**LINE, "MESSAGE": [256]}).encode(),
        json.dumps({**LINE, "MESSAGE": ["a", "b"]}).encode(),
        json.dumps({**LINE, "PRIORITY": "x"}).encode(),
        json.dumps({**LINE, "__MONOTONIC_TIMESTAMP": "9" * 5000}).encode(),
        json.dumps({**LINE, "__MONOTONIC_TIMESTAMP": []}).encode(),
        json.dumps(LINE).encode()[:-9],
    ],
    ids=repr,
)  # fmt: skip
def test_a_malformed_line_is_not_an_entry(line: bytes) -> None:
    assert parse_entry(line) is None


@given(
    st.binary(max_size=100)
    | st.dictionaries(
        st.sampled_from(sorted(LINE)), st.none() | st.text() | st.lists(st.integers()) | st.floats()
    ).map(lambda d: json.dumps({**LINE, **d}).encode())
)
def test_no_bytes_make_the_parser_of_journal_entries_raise(line: bytes) -> None:
    found = parse_entry(line)
    assert found is None or isinstance(found.text, str)

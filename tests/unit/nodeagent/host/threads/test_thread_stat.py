from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nodeagent.host.stuck_threads import (
    MAX_NAME,
    PF_KTHREAD,
    context_switches,
    has_several_threads,
    may_be_asleep,
    parse_stat,
)

LINE = b"42 (a b) c) %s 1 42 42 0 -1 %d 143 0 0 0 0 0 0 0 20 0 3 0 777 9 9\n"


def test_a_name_with_blanks_and_parentheses_is_parsed() -> None:
    found = parse_stat(LINE % (b"D", 4194304))
    assert found is not None
    assert (found.name, found.state, found.start) == ("a b) c", "D", 777)
    assert found.is_asleep


def test_the_state_and_the_number_of_threads_are_read_without_the_other_fields() -> None:
    assert may_be_asleep(LINE % (b"D", 0))
    assert not may_be_asleep(LINE % (b"S", 0))
    assert has_several_threads(LINE % (b"S", 0))
    assert not has_several_threads((LINE % (b"S", 0)).replace(b" 3 0 777", b" 1 0 777"))


def test_kernel_threads_may_be_in_uninterruptible_sleep() -> None:
    found = parse_stat(LINE % (b"D", 4194304 | PF_KTHREAD))
    assert found is not None
    assert not found.is_asleep


def test_both_kinds_of_context_switches_count() -> None:
    status = b"Name:\tx\nvoluntary_ctxt_switches:\t5\nnonvoluntary_ctxt_switches:\t2\n"
    assert context_switches(status) == 7
    assert context_switches(b"Name:\tx\n") is None
    assert context_switches(b"voluntary_ctxt_switches:\tN/A\n") is None


@given(st.one_of(st.binary(max_size=200), st.binary(max_size=30).map(lambda junk: LINE % (b"D", 1) + junk)))
def test_no_bytes_make_the_parsers_of_stat_and_status_raise(raw: bytes) -> None:
    for each in (parse_stat(raw), parse_stat(raw[: len(raw) // 2])):
        assert each is None or (each.flags >= 0 and len(each.name) <= MAX_NAME)
        assert each is None or not each.is_asleep or may_be_asleep(raw)
    assert (context_switches(raw) or 0) >= 0
    assert has_several_threads(raw) in (True, False)

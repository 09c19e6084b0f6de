from __future__ import annotations

from dataclasses import dataclass, field, fields

from holdfast.journal_fields import UNRECORDED, is_recorded
from holdfast.protocol.codec import added, is_added
from holdfast.protocol.launcher_messages import Launch
from holdfast.protocol.member_messages import MemberReport, StateSource


@dataclass(frozen=True)
class Both:
    plain: int = 0
    unrecorded: int = field(default=0, metadata=UNRECORDED)
    both: int = field(default=0, metadata={**UNRECORDED, **added()})


def test_a_field_is_recorded_unless_it_is_marked() -> None:
    assert [is_recorded(each) for each in fields(Both)] == [True, False, False]
    assert [is_added(each) for each in fields(Both)] == [False, False, True]


def test_the_journal_omits_these_fields_of_messages() -> None:
    omitted = {
        kind.__name__: [each.name for each in fields(kind) if not is_recorded(each)]
        for kind in (Launch, MemberReport, StateSource)
    }
    assert omitted == {
        "Launch": ["backups"],
        "MemberReport": ["reading_s", "launcher_unreachable", "storage", "unreached", "unreached_s"],
        "StateSource": ["count"],
    }

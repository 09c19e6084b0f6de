"""A job survives any content that the types of a member's report allow, and makes a decision."""

from __future__ import annotations

import json
import typing
from dataclasses import fields, is_dataclass, replace
from types import UnionType
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from holdfast.protocol import codec
from holdfast.protocol.member_messages import PROTOCOL, MemberReport
from supervisor.decision import orders, transition
from supervisor.decision.decide import decide
from supervisor.decision.durable_facts import with_durable_facts
from supervisor.hangs import observation
from supervisor.observability import incident_record, status
from supervisor.observability.bookkeeping import Bookkeeping
from supervisor.store.recorded import recorded
from supervisor.view.model import Policy, View, Wait
from tests.unit.supervisor.job_views import S, fault, member, memory, view

POLICY = Policy(members=2, members_created_externally=True)
PHASES = ("forming", "running", "securing", "saving", "stopping", "ended")
# Numbers near the job's own are more interesting than arbitrary ones.
NUMBERS = st.one_of(st.integers(-2, 12), st.integers(-(1 << 62), 1 << 62))
SECONDS = st.one_of(st.floats(-2.0, 200.0), st.floats(-codec.MAX_SECONDS, codec.MAX_SECONDS))
FLOATS = st.one_of(SECONDS, st.floats(allow_nan=False, allow_infinity=False))
NUMERALS = st.floats().map(repr)
WORDS = st.one_of(
    st.sampled_from(["", "m0", "m1", "forward", "running", "exited", "nan", "1e999", "http://m0:1"]),
    st.text(max_size=12),
    NUMERALS,
)


def of(hint: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for the values that `codec` accepts for a type."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, UnionType):
        return st.one_of(*(st.none() if each is type(None) else of(each) for each in typing.get_args(hint)))
    if origin is typing.Literal:
        return st.one_of(st.sampled_from(typing.get_args(hint)), WORDS)
    if origin is tuple:
        items = typing.get_args(hint)
        if len(items) == 2 and items[1] is Ellipsis:
            return st.lists(of(items[0]), max_size=3).map(tuple)
        return st.tuples(*map(of, items))
    if is_dataclass(hint):
        return built(hint)
    return {int: NUMBERS, float: FLOATS, str: WORDS, bool: st.booleans()}[hint]


def built(kind: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for messages of a type: JSON that `codec.decode` accepts, decoded."""
    hints = typing.get_type_hints(kind)
    required = {
        each.name: SECONDS if codec.is_seconds(each.name, hints[each.name]) else of(hints[each.name])
        for each in fields(kind)
    }
    return st.fixed_dictionaries(required).map(lambda found: _accepted(kind, found)).filter(bool)


def _accepted(kind: Any, found: dict[str, Any]) -> Any:
    try:
        return kind(**found)
    except ValueError:  # the message itself refuses the values
        return None


REPORTS = built(MemberReport).map(lambda found: replace(found, protocol=PROTOCOL, member="m0"))


@given(
    st.tuples(st.one_of(st.none(), REPORTS), REPORTS), st.sampled_from(PHASES), st.booleans(), st.booleans()
)
@settings(max_examples=200, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
def test_a_job_decides_and_is_shown_whatever_its_members_report(
    told: tuple[MemberReport | None, MemberReport], phase: str, settled: bool, hurt: bool
) -> None:
    reports = [None if each is None else codec.decode(MemberReport, codec.encode(each)) for each in told]
    opened = None
    if hurt:
        opened = transition._opened(view(), (fault("crash"),))
    seen: View = view(
        *(member(f"m{number}", each) for number, each in enumerate(reports)),
        phase=phase,
        settled=settled,
        incident=opened,
        incidents=int(hurt),
    )
    seen = replace(seen, memory=with_durable_facts(seen), watch=observation.update(seen.watch, seen))
    accounts = Bookkeeping(90 * S, None)
    for _ in range(6):
        accounts.observe(seen)
        action = decide(seen, POLICY)
        json.dumps(recorded(seen)), json.dumps(recorded(action))
        json.dumps(status.build(seen, accounts, status.StatusContext("run", 0.0, 1, POLICY)))
        if isinstance(action, Wait):
            break
        after = transition.after(seen, action, POLICY)
        json.dumps(recorded(after))
        if after.incident is not None:
            json.dumps(incident_record.record(after.incident, None))
        for name in ("m0", "m1", "m2"):
            codec.decode(
                type(orders.order_for(after, name, POLICY, None)),
                codec.encode(orders.order_for(after, name, POLICY, None)),
            )
        seen = replace(seen, memory=after)
    assert memory().world_size == seen.memory.world_size

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from supervisor.quarantine import release
from supervisor.quarantine.model import Incident, NodeView
from tests.unit.supervisor.node_views import DAY_S, NOW_S, POLICY

HISTORIES = st.lists(
    st.builds(Incident, st.floats(NOW_S - 400 * DAY_S, NOW_S + DAY_S), st.just("replace"), st.booleans()),
    max_size=16,
)


def proof_s(*history: Incident) -> float:
    return release.required_health_s(NodeView("a", history=history), NOW_S, POLICY)


def test_the_first_incident_needs_the_usual_proof() -> None:
    assert proof_s() == POLICY.clean_s
    assert proof_s(Incident(NOW_S, "reset_gpu")) == POLICY.clean_s


def test_each_incident_doubles_the_proof_and_half_of_it_is_forgotten_in_two_weeks() -> None:
    first, now = Incident(NOW_S - 14 * DAY_S, "reset_gpu"), Incident(NOW_S, "reset_gpu")
    assert proof_s(now, now) == 2 * POLICY.clean_s
    assert proof_s(now, now, now) == 4 * POLICY.clean_s
    assert proof_s(first, now) == 2**0.5 * POLICY.clean_s


def test_a_relapse_counts_twice() -> None:
    again = Incident(NOW_S, "reset_gpu", relapse=True)
    assert proof_s(Incident(NOW_S, "reset_gpu"), again) == 4 * POLICY.clean_s


@given(HISTORIES, st.builds(Incident, st.just(NOW_S), st.just("replace"), st.booleans()))
def test_a_lemon_stays_out_longer_but_not_indefinitely(history: list[Incident], another: Incident) -> None:
    before_s, after_s = proof_s(*history), proof_s(*history, another)
    assert POLICY.clean_s <= before_s <= after_s <= POLICY.max_clean_s

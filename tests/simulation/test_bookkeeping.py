from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from supervisor.observability.bookkeeping import Bookkeeping
from supervisor.observability.ledger import Bucket
from supervisor.view.model import Policy
from tests.simulation.cluster.world import World

KINDS = ["raise", "kill", "hang", "lose", "supervisor", "nan"]
PLACES = st.tuples(st.integers(0, 1), st.integers(0, 7))


@settings(max_examples=100)
@given(st.dictionaries(PLACES, st.sampled_from(KINDS), max_size=4), st.booleans())
@example(cues={(0, 0): "raise", (0, 1): "lose"}, supervised=False)
def test_the_buckets_add_up_to_the_clock_in_every_history(
    cues: dict[tuple[int, int], str], supervised: bool
) -> None:
    """The world also asserts this at every decision."""
    policy = Policy(members=2, standby=1, checkpoint_every_s=0.12)
    given_cues = {place: (what, 1) for place, what in cues.items()}
    kills = frozenset() if supervised else frozenset({20, 40})
    world = World(policy, 8, cues=given_cues, kills=kills).run()
    ledger = Bookkeeping(0, world.ledger).ledger
    assert sum(ledger.buckets_ns().values()) + ledger.pending_ns == ledger.total_ns
    assert min(ledger.buckets_ns().values()) >= 0
    assert ledger.activity is Bucket.STOP
    if not cues:
        assert ledger.buckets_ns()[Bucket.LOST] == 0

from __future__ import annotations

import pytest

from holdfast.protocol.member_messages import HeldChecksum
from supervisor.view import replica_divergence
from supervisor.view.model import Fault, MemberView, PastFault
from tests.unit.supervisor.job_views import launcher, member, report, view

GOOD, BAD, WORSE = 0xAAAA0001, 0xBBBB0002, 0xCCCC0003


def sealed(
    name: str, *crcs: int, first: int = 16, generation: int = 1, total_bytes: int = 4096
) -> MemberView:
    """Return a member with seals of steps `first`, 2 x `first`, ..."""
    seals = tuple(HeldChecksum(generation, first * at, total_bytes, crc) for at, crc in enumerate(crcs, 1))
    return member(name, report(name, launcher(), seals=seals))


def found(*members: MemberView, history: tuple[PastFault, ...] = ()) -> Fault | None:
    placement = tuple(each.name for each in members)
    return replica_divergence.find_divergence(view(*members, placement=placement, history=history))


def test_equal_replicas_are_not_a_fault() -> None:
    assert found(*(sealed(f"m{at}", GOOD, BAD, WORSE) for at in range(3))) is None


def test_two_differing_replicas_do_not_show_which_is_wrong() -> None:
    fault = found(sealed("m0", GOOD, GOOD, GOOD), sealed("m1", GOOD, GOOD, BAD))
    assert fault is not None
    assert (fault.kind, fault.rank, fault.member, fault.step) == ("diverged", -1, "", 32)
    assert (
        "at step 48 m0 and m1 differ (checksums m0 aaaa0001, m1 bbbb0002); they matched at step 32"
        in fault.detail
    )


def test_the_majority_identifies_the_differing_replica() -> None:
    members = [sealed("m0", GOOD, GOOD, GOOD, WORSE), sealed("m1", GOOD, GOOD, BAD, BAD)]
    fault = found(*members, sealed("m2", GOOD, GOOD, GOOD, WORSE))
    assert fault is not None
    assert (fault.rank, fault.member, fault.step) == (1, "m1", 32)
    assert "m1 differs from the others" in fault.detail


@pytest.mark.parametrize(
    ("crcs", "named"),
    [
        ((GOOD, GOOD, BAD), ("m2",)),
        ((BAD, GOOD, GOOD), ("m0",)),
        ((GOOD, BAD, WORSE), ()),
        ((GOOD, GOOD, BAD, BAD), ()),
        ((GOOD, GOOD, GOOD, BAD, WORSE), ("m3", "m4")),
    ],
)
def test_a_majority_is_more_than_half(crcs: tuple[int, ...], named: tuple[str, ...]) -> None:
    assert replica_divergence.minority({f"m{at}": crc for at, crc in enumerate(crcs)}, len(crcs)) == named


def test_nothing_is_judged_before_enough_replicas_have_sealed() -> None:
    members = [sealed("m0", GOOD, GOOD, GOOD), sealed("m1", GOOD, GOOD, BAD)]
    assert found(*members, sealed("m2", GOOD, GOOD)) is None
    assert found(*members, sealed("m2", GOOD, GOOD, WORSE)) is not None
    late = found(*members, sealed("m2", GOOD, GOOD, GOOD), sealed("m3", GOOD, GOOD))
    assert late is None, "two of four are not a majority"
    members = [*members, sealed("m2", GOOD, GOOD, GOOD), sealed("m3", GOOD, GOOD, GOOD)]
    named = found(*members, sealed("m4", GOOD, GOOD))
    assert named is not None
    assert named.member == "m1"


def test_a_script_whose_replicas_were_never_equal_is_not_judged() -> None:
    assert found(sealed("m0", GOOD, GOOD, GOOD), sealed("m1", BAD, BAD, BAD)) is None
    assert found(sealed("m0", GOOD, GOOD), sealed("m1", GOOD, BAD)) is None, (
        "replicas that matched once prove nothing"
    )


def test_steps_sealed_by_only_one_member_prove_nothing() -> None:
    assert found(sealed("m0", GOOD, GOOD, GOOD), sealed("m1", GOOD, BAD, BAD, first=17)) is None


def test_states_of_different_size_prove_nothing() -> None:
    assert found(sealed("m0", GOOD, GOOD, GOOD), sealed("m1", GOOD, GOOD, BAD, total_bytes=8192)) is None


def test_seals_of_another_generation_or_of_a_standby_do_not_count() -> None:
    old = sealed("m1", GOOD, GOOD, BAD, generation=2)
    assert found(sealed("m0", GOOD, GOOD, GOOD), old) is None
    standing_by = sealed("m2", GOOD, GOOD, BAD)
    two = (sealed("m0", GOOD, GOOD, GOOD), sealed("m1", GOOD, GOOD, GOOD))
    assert replica_divergence.find_divergence(view(*two, standing_by)) is None


def test_a_recurring_difference_is_attributed_to_the_script() -> None:
    members = (sealed("m0", GOOD, GOOD, GOOD), sealed("m1", GOOD, GOOD, BAD))
    past = PastFault("diverged", -1, "", 32, "diverged", 1, 1)
    assert found(*members, history=(past,) * (replica_divergence.TRIES - 1)) is not None
    assert found(*members, history=(past,) * replica_divergence.TRIES) is None


def test_equality_before_a_restart_counts_after_it() -> None:
    """The replicas differed, and a rank died before the next seals showed it, so each kept its own state."""
    members = sealed("m0", GOOD, BAD, first=400, generation=1), sealed("m1", WORSE, GOOD, first=400)
    seen = view(*members, equal=(128, 256))
    fault = replica_divergence.find_divergence(seen)
    assert fault is not None
    assert fault.step == 256
    assert replica_divergence.find_divergence(view(*members, equal=(256,))) is None, (
        "replicas that matched once prove nothing"
    )


def test_a_roll_back_keeps_what_was_equal_before() -> None:
    assert replica_divergence.rolled_back((128, 256), 300) == (128, 256)
    assert replica_divergence.rolled_back((128, 256), 200) == (128, 200)
    assert replica_divergence.rolled_back((128, 256), 100) == (100,)

"""What happens when no more evidence can be stored: the gravest is kept, and what is lost is counted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nodeagent.evaluation import quotas
from nodeagent.evaluation.evaluator import Evaluator
from nodeagent.model import NODE, Level, Observation
from nodeagent.policy.loading import shipped
from tests.unit.nodeagent.evaluation.world import DAY_S, GPU, mark, xid

POLICY = shipped()
HARMLESS, DEGRADING, GRAVE = (13, 31, 43, 63), (94,), (48, 79, 95, 119)
GPUS = (GPU, "gpu/0000:4b:00.0", "gpu/0000:5b:00.0")
LIMIT = 6
Key = tuple[str, str, int | None]


def of(entity: str, code: int, at_s: float) -> Observation:
    return Observation(at_s, "xid", entity, "kmsg", float(code))


def levels(made: Evaluator, now_s: float) -> dict[Key, Level]:
    return {(each.entity, each.check, each.code): each.level for each in made.findings(now_s)}


def unhealthy(made: Evaluator, now_s: float) -> set[Key]:
    return {key for key, level in levels(made, now_s).items() if level is Level.UNHEALTHY}


@pytest.fixture
def few() -> Iterator[None]:
    """Let the evaluator store only `LIMIT` series and events of each kind of entity."""
    with pytest.MonkeyPatch.context() as patch:
        for limit in ("MAX_SERIES", "MAX_EVENTS", "MAX_OWN"):
            patch.setattr(quotas, limit, LIMIT)
        yield


def test_a_grave_fault_makes_room_among_harmless_ones_that_stand() -> None:
    made = Evaluator(POLICY, 575)
    count = quotas.MAX_OWN // len(HARMLESS)
    for n in range(count):
        for code in HARMLESS:
            assert made.add(of(f"gpu/{n:04x}:00:00.0", code, float(n % 500)))
    assert (len(made.findings(500.0)), made.dropped) == (count * len(HARMLESS), 0)
    assert not made.add(of(GPU, 13, 500.0)), "it is no graver than what stands"
    assert made.dropped == 1
    assert made.add(of(GPU, 95, 500.0)), "also within the moment in which harmless ones are refused"
    assert unhealthy(made, 501.0) == {(GPU, "xid", 95)}
    lost = made.dropped - 1
    assert 0 < lost <= quotas.MAX_OWN // quotas.LOST_SHARE
    left = made.findings(501.0)
    assert len(left) == quotas.MAX_OWN - lost + 1, "what made room is counted"
    assert min(each.last_s for each in left) > 0.0, "the longest unseen made room"
    assert made.add(mark("gpu_reset", 502.0))
    assert (GPU, "xid", 95) not in levels(made, 1103.0), "its remedy ends it"


def test_the_least_grave_makes_room_first_and_then_the_longest_unseen(few: None) -> None:
    made = Evaluator(POLICY, 575)
    for at_s, code in enumerate((95, 94, 43, 13, 31, 63)):
        made.add(xid(code, float(at_s)))
    for code, gone in ((48, 43), (79, 13), (119, 31), (64, 63), (46, 94)):
        before = made.dropped
        assert made.add(xid(code, 10.0))
        kept = {each.code for each in made.findings(11.0)}
        assert gone not in kept
        assert code in kept
        assert made.dropped == before + 1
    assert len(unhealthy(made, 11.0)) == LIMIT
    assert not made.add(xid(140, 12.0)), "nothing takes the place of an unhealthy finding's evidence"
    assert not made.add(xid(13, 12.5))
    assert made.dropped == 7, "what is refused is counted"


def test_what_counts_towards_a_recurrence_is_given_up_last_of_what_has_ended_and_counted(few: None) -> None:
    made = Evaluator(POLICY, 575)
    made.add(xid(79, 0.0))
    made.add(mark("boot", 100.0))
    for code in (13, 31, 43, 63, 45):
        made.add(xid(code, 200.0))
    assert made.add(xid(48, 2000.0))
    assert made.dropped == 0, "a harmless one that has ended made room"
    assert {79, 13} & {row[2] for row in made.dump()["events"]} == {79}
    for n, code in enumerate((95, 119, 64, 46)):
        assert made.add(xid(code, 2001.0 + n))
    assert made.dropped == 0
    assert made.add(xid(140, 2010.0))
    assert (made.dropped, {row[2] for row in made.dump()["events"]} & {79}) == (1, set())


def test_what_ends_findings_is_stored_even_if_all_that_stands_is_unhealthy(few: None) -> None:
    made = Evaluator(POLICY, 575)
    for code in (48, 79, 95, 119, 64, 46):
        made.add(xid(code, 0.0))
    assert not made.add(xid(140, 1.0))
    assert not made.add(Observation(1.5, "cleared", "gpu/0000:ff:00.0", "operator"))
    assert made.dropped == 2, "of an entity without evidence, it would end nothing"
    assert made.add(mark("gpu_reset", 2.0))
    assert made.add(mark("cleared", 3.0)), "an operator's word is never refused"
    assert made.dropped == 2
    assert not made.findings(4.0)


def test_a_line_about_the_nodes_own_disk_takes_the_place_of_lines_about_users_volumes(few: None) -> None:
    made = Evaluator(POLICY, 575)
    made.add(Observation(0.0, "user_volume", "disk/nvme0n1", "host", 0.0))
    for n in range(LIMIT):
        assert made.add(Observation(1.0, "kernel_remounted_read_only", f"disk/rbd{n}", "kmsg"))
    assert not made.add(Observation(2.0, "kernel_remounted_read_only", "disk/rbd9", "kmsg"))
    assert made.add(Observation(2.0, "kernel_remounted_read_only", "disk/nvme0n1", "kmsg"))
    assert {entity for entity, *_ in unhealthy(made, 3.0)} == {"disk/nvme0n1"}
    assert made.dropped == 2


def test_the_use_of_a_disk_that_the_kernel_has_given_up_on_never_makes_room(few: None) -> None:
    made = Evaluator(POLICY, 575)
    made.add(Observation(0.0, "user_volume", "disk/nvme1", "host", 0.0))
    made.add(Observation(1.0, "kernel_nvme_disabled", "disk/nvme1", "kmsg"))
    for n in range(LIMIT):
        assert made.add(Observation(2.0 + n, "user_volume", f"disk/rbd{n}", "host", 1.0))
        assert {entity for entity, *_ in unhealthy(made, 10.0)} == {"disk/nvme1"}
    assert len(made.dump()["series"]) == LIMIT


def test_samples_of_a_check_that_finds_graver_faults_take_the_place_of_volumes_that_stand(few: None) -> None:
    made = Evaluator(POLICY, 575)
    for n in range(LIMIT):
        made.add(Observation(float(n), "volume_used", f"disk//pods/{n}", "host", 100.0))
    assert len(made.findings(6.0)) == LIMIT
    assert made.add(Observation(10.0, "disk_read_only", "disk//", "host", 1.0))
    assert unhealthy(made, 11.0) == {("disk//", "disk_read_only", None)}
    assert made.dropped == 1
    assert not made.add(Observation(20.0, "volume_used", "disk//pods/0", "host", 100.0)), "it may not return"
    assert made.add(Observation(30.0, "disk_used", "disk//", "host", 10.0)), "it may become graver"
    assert unhealthy(made, 31.0) == {("disk//", "disk_read_only", None)}
    assert len(made.dump()["series"]) == LIMIT


STEPS = st.lists(
    st.tuples(
        st.sampled_from([0.1, 5.0, 400.0, 1300.0, DAY_S]),
        st.sampled_from(GPUS),
        st.sampled_from([*HARMLESS, *DEGRADING, *GRAVE, *GRAVE, "gpu_reset", "cleared", "boot"]),
    ),
    max_size=40,
)


@given(STEPS)
@settings(max_examples=150)
@example([(0.1, GPUS[n % 3], code) for n, code in enumerate([*HARMLESS * 2, *GRAVE, 94, *GRAVE, "cleared"])])
def test_no_unhealthy_finding_is_lost_and_none_is_refused_while_anything_milder_is_kept(
    steps: list[tuple[float, str, int | str]],
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quotas, "MAX_OWN", LIMIT)
        made, now_s = Evaluator(POLICY, 575), 1000.0
        patch.setattr(quotas, "MAX_OWN", 10**6)
        whole = Evaluator(POLICY, 575)  # what an evaluator without limits finds
        for wait_s, gpu, what in steps:
            now_s += wait_s
            entity = NODE if what == "boot" else gpu
            seen = of(gpu, what, now_s) if isinstance(what, int) else Observation(now_s, what, entity, "test")
            whole.add(seen)
            patch.setattr(quotas, "MAX_OWN", LIMIT)
            stood, dropped = unhealthy(made, now_s - 0.01), made.dropped
            known = {(row[0], row[1], row[2]) for row in made.dump()["events"]}
            made.add(seen)
            patch.setattr(quotas, "MAX_OWN", 10**6)
            assert stood - unhealthy(made, now_s) <= stood - unhealthy(whole, now_s)
            key = (entity, "xid", what)
            if what in GRAVE and key not in unhealthy(made, now_s):
                assert made.dropped == dropped + 1
                assert not [each for each in levels(made, now_s).values() if each < Level.UNHEALTHY]
            stored = {(row[0], row[1], row[2]) for row in made.dump()["events"]}
            gone = {each for each in known - stored if (each[0], each[1], each[2]) in levels(whole, now_s)}
            assert made.dropped >= dropped + len(gone), "what made room is counted"
            assert sum(check == "xid" for _, check, _ in stored) <= LIMIT

from __future__ import annotations

from nodeagent.kernel.line_reader import MAX_KEYS, LineReader
from tests.unit.nodeagent.kernel.world import LINES, XID_79

FALLEN = "NVRM: GPU 0000:3b:00.0: GPU has fallen off the bus."
SLOW = "nfs: server 10.0.0.9 not responding, still trying"
WELL = "nfs: server 10.0.0.9 OK"
VERDICT = "NVRM: Xid (PCI:0000:3b:00): 154, GPU recovery action changed from 0x0 (None) to {}"
RESET, OVER = VERDICT.format("0x1 (GPU Reset Required)"), VERDICT.format("0x0 (None)")


def told(*lines: tuple[float, str]) -> list[tuple[float, str, str]]:
    sightings = LineReader(LINES, "kmsg")
    return [(o.at_s, o.check, o.variant) for at_s, text in lines for o in sightings.read(text, at_s)]


def test_a_storm_of_equal_lines_is_reported_once_a_second() -> None:
    assert [at_s for at_s, *_ in told(*((n / 1000, XID_79) for n in range(2500)))] == [0.0, 1.0, 2.0]


def test_a_gpu_off_the_bus_is_reported_once_although_two_lines_name_it() -> None:
    assert len(told((5.0, XID_79), (5.001, FALLEN))) == 1


def test_lines_of_another_gpu_or_another_variant_are_reported() -> None:
    place = "NVRM: Xid (PCI:0000:3b:00): 13, Graphics SM Warp Exception on (GPC 1, TPC {}, SM 0): Error"
    assert len(told((5.0, XID_79), (5.1, XID_79.replace("3b", "5e")))) == 2
    assert len(told((5.0, place.format(1)), (5.1, place.format(2)), (5.2, place.format(1)))) == 2


def test_a_line_that_recurs_after_the_finding_was_cleared_is_reported_again() -> None:
    assert [c for _, c, _ in told((1.0, SLOW), (1.1, WELL), (1.2, SLOW), (1.3, SLOW), (1.4, WELL))] == [
        "kernel_nfs_timeout", "cleared", "kernel_nfs_timeout", "cleared",
    ]  # fmt: skip


def test_each_change_of_the_drivers_verdict_is_reported() -> None:
    lines = ((1.0, RESET), (1.1, RESET), (1.2, OVER), (1.3, RESET), (1.4, RESET))
    assert [v for *_, v in told(*lines)] == ["reset_gpu", "none", "reset_gpu"]


def test_a_known_uuid_of_a_gpu_is_a_fact_of_later_lines() -> None:
    sightings = LineReader(LINES, "kmsg")
    assert sightings.read("NVRM: GPU at PCI:0000:3b:00: GPU-7f2b4c1e-0f59", 1.0) == []
    [known], [other] = sightings.read(XID_79, 1.0), sightings.read(XID_79.replace("3b", "5e"), 1.0)
    assert ("uuid", "GPU-7f2b4c1e-0f59") in known.facts
    assert "uuid" not in dict(other.facts)
    assert (known.source, known.at_s) == ("kmsg", 1.0)


def test_the_memory_for_a_storm_of_different_events_is_bounded() -> None:
    sightings = LineReader(LINES, "kmsg")
    for server in range(3 * MAX_KEYS):
        assert len(sightings.read(f"nfs: server 10.0.{server}.9 not responding, still trying", 1.0)) == 1
    assert len(sightings._reported) == MAX_KEYS
    sightings.read(XID_79, 9.0)
    assert len(sightings._reported) == 1


def test_a_line_stamped_earlier_than_the_previous_one_is_reported() -> None:
    assert len(told((5.0, XID_79), (4.0, XID_79))) == 2

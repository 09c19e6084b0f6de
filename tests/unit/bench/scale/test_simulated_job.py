"""Simulated members report what real ones report, and obey what the supervisor orders."""

from __future__ import annotations

import json

from bench.scale.simulated_job import START_S, STEP_S, JobProgress, ReportText, S, SimulatedMember
from holdfast.protocol import codec
from holdfast.protocol.launcher_messages import Launch, RankStart, Restore
from holdfast.protocol.member_messages import MemberOrder, MemberReport
from sidecar.report_updates import ReportWriter
from supervisor.controller.reports.report_decoder import ReportDecoder
from supervisor.view.member_clocks import ClockOffset, on_supervisor_clock

BEGIN_NS = 50 * S


def members(count: int = 2, nproc: int = 2) -> list[SimulatedMember]:
    job = JobProgress()
    return [SimulatedMember(job, 3, index, count, nproc) for index in range(count)]


def run(member: SimulatedMember, generation: int, restore: Restore | None = None) -> MemberOrder:
    launch = Launch(generation, 4, 2, "10.0.0.1", 4000, -1, 0.01, restore=restore)
    ranks = tuple(RankStart(member.index * member.nproc + each, each) for each in range(member.nproc))
    return MemberOrder("run", generation, launch=launch, ranks=ranks, epoch=1)


def after(steps: float) -> int:
    return BEGIN_NS + int((START_S + STEP_S * (steps + 0.5)) * S)


def test_a_group_trains_in_step_from_the_order_on() -> None:
    first, second = members()
    assert first.obey(run(first, 1), BEGIN_NS)
    assert second.obey(run(second, 1), BEGIN_NS + S)
    assert not first.obey(run(first, 1), BEGIN_NS + S), "it already has this order"
    reports = [each.report(after(7)) for each in (first, second)]
    assert [[rank.step for rank in each.progress] for each in reports] == [[7, 7], [7, 7]]
    assert [rank.rank for each in reports for rank in each.progress] == [0, 1, 2, 3]


def test_times_are_those_of_the_members_own_host() -> None:
    first, second = members()
    for each in (first, second):
        each.obey(run(each, 1), BEGIN_NS)
        told = each.report(after(1))
        offset = ClockOffset().heard(told, "the supervisor's", after(1))
        moved = on_supervisor_clock(told, offset)
        assert moved.launcher is not None
        assert moved.launcher.ranks[0].marks.started_ns == BEGIN_NS
        assert BEGIN_NS < moved.launcher.ranks[0].marks.first_step_ns <= after(1)


def test_the_survivors_state_is_enough_to_resume_at_the_step_of_the_fault() -> None:
    group = members()
    for each in group:
        each.obey(run(each, 1), BEGIN_NS)
    group[1].fail(0, after(9))
    failed = group[1].report(after(12))
    assert failed.launcher is not None
    assert [each.state for each in failed.launcher.ranks] == ["exited", "running"]
    for each in group:
        assert each.obey(MemberOrder("secure", 1, epoch=1), after(12))
    found = [each.report(after(13)) for each in group]
    assert all((slot.generation, slot.step) == (1, 9) for each in found for slot in each.slots[:1])
    assert {state.rank for each in found for state in each.privates if state.step == 9} == {0, 1, 2, 3}
    restore = Restore(9, 1, "slot")
    for each in group:
        each.obey(run(each, 2, restore), after(14))
    assert group[0].job.step(after(14)) == 9
    assert group[0].job.step(after(14) + 60 * S) > 9


def test_an_order_of_a_supervisor_that_was_replaced_is_ignored() -> None:
    first, _ = members()
    first.obey(MemberOrder("idle", 0, epoch=2), BEGIN_NS)
    assert not first.obey(run(first, 1), BEGIN_NS)
    assert first.state.generation == 0


def test_the_text_of_a_report_is_what_a_sidecar_would_send() -> None:
    first, _ = members()
    text = ReportText(first)
    first.obey(run(first, 1), BEGIN_NS)
    for steps in (0, 1, 2, 140, 141):
        sent = text.at(after(steps))
        found = codec.decode(MemberReport, sent)
        assert codec.encode(found).decode() == sent
        assert [each.step for each in found.progress] == [steps, steps]
        assert found.now_ns == after(steps) + first.clock_ns
    numbers = [json.loads(text.at(after(150 + each)))["sequence"] for each in range(3)]
    assert numbers == sorted(set(numbers))


def test_an_update_is_what_a_sidecar_would_send() -> None:
    first, _ = members()
    text, decoder = ReportText(first), ReportDecoder()
    first.obey(run(first, 1), BEGIN_NS)
    writer = ReportWriter(updates=True)
    short = 0
    for now_ns in map(after, (1, 2, 2.2, 3, 140, 141)):
        sent = text.at(now_ns, updates=True)
        found = decoder.decode(sent)
        assert writer.text(found) == sent
        assert [each.step for each in found.progress] == [first.job.step(now_ns)] * 2
        assert found.now_ns == now_ns + first.clock_ns
        short += len(sent) < 700
    assert short == 4
    text.connect()
    assert ReportDecoder().decode(text.at(after(142), updates=True)).progress[0].step == 142

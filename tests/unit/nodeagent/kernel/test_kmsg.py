from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from nodeagent.kernel import kmsg
from nodeagent.kernel.kmsg import BUFFER_BYTES, MAX_RECORDS, KmsgCursor, KmsgSensor
from nodeagent.sensing.clock import Anchor, Clock
from nodeagent.sensing.sensor import Unavailable
from tests.unit.nodeagent.kernel.world import (
    BOOT,
    CLOCK,
    IMPORTANT,
    LINES,
    XID_79,
    Log,
    Script,
    events,
    lost,
    raw,
    sensor,
)


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kmsg, "WAIT_S", 0.0)


@pytest.fixture
def log() -> Iterator[Log]:
    made = Log()
    yield made
    made.end()


def test_a_kernel_line_is_an_observation_at_the_time_it_was_written(log: Log) -> None:
    log.write(raw(1), raw(2, XID_79, at_s=5.0), raw(3))
    [found] = events(sensor(log).read())
    assert (found.check, found.entity, found.value, found.source) == ("xid", "gpu/0000:3b:00.0", 79, "kmsg")
    assert found.at_s == pytest.approx(
        CLOCK.from_monotonic(5.0), abs=1.0
    )  # as far as NTP has moved the clock
    assert found.text == XID_79


def test_a_line_written_by_a_program_is_not_trusted(log: Log) -> None:
    log.write(raw(1, XID_79, facility=1), raw(2, XID_79, facility=3))
    assert events(sensor(log).read()) == []


def test_lines_from_user_space_are_accepted_on_request_in_tests(log: Log) -> None:
    log.write(raw(1, XID_79, facility=1))
    assert len(events(sensor(log, trust_user_lines=True).read())) == 1


def test_records_read_before_are_not_read_again(log: Log) -> None:
    log.write(raw(1, XID_79), raw(2), raw(3, XID_79.replace("3b", "5e")))
    reader = sensor(log, KmsgCursor(BOOT, 2))
    assert [found.entity for found in events(reader.read())] == ["gpu/0000:5e:00.0"]
    assert reader.cursor == KmsgCursor(BOOT, 3)


def test_records_are_not_read_again_after_the_sensor_was_reopened(log: Log) -> None:
    reader = sensor(log)
    log.write(raw(1, XID_79))
    assert len(events(reader.read())) == 1
    reader.close()
    reader.close()
    with pytest.raises(Unavailable, match="not open"):
        reader.read()
    reader.open()
    log.write(raw(1, XID_79), raw(2, XID_79, at_s=9.0))
    assert len(events(reader.read())) == 1


def test_the_cursor_of_another_boot_is_ignored(log: Log) -> None:
    log.write(raw(1, XID_79))
    assert len(events(sensor(log, KmsgCursor("another", 100)).read())) == 1


def test_records_that_were_overwritten_before_the_first_read_of_a_boot_are_lost(log: Log) -> None:
    log.write(raw(5000), raw(5001))
    reader = sensor(log, KmsgCursor("another", 777))
    reader.read()
    assert (reader.lost, reader.left_out()) == (5000, ())


def test_records_from_before_the_first_start_are_no_loss_but_are_left_out(log: Log) -> None:
    reader = sensor(log)
    assert reader.left_out() == ()
    log.write(raw(5000), raw(5001), raw(5003))
    reader.read()
    assert reader.lost == 1
    [found] = reader.left_out()
    assert (found.what, found.is_open) == ("sensor/kmsg", False)
    assert "the first 5000 records of this boot" in found.why


def test_nothing_is_lost_if_the_log_of_a_boot_is_read_from_its_start(log: Log) -> None:
    for cursor in (None, KmsgCursor("another", 777)):
        reader = sensor(log, cursor)
        log.write(raw(0), raw(1))
        reader.read()
        assert (reader.lost, reader.left_out()) == (0, ())


def test_before_the_first_record_there_is_no_cursor(log: Log) -> None:
    reader = sensor(log)
    assert reader.cursor is None
    assert events(reader.read()) == []
    log.write(b"garbage")
    reader.read()
    assert reader.cursor is None


def test_overwritten_records_are_counted_and_the_rest_is_read(log: Log) -> None:
    reader = sensor(log)
    log.write(raw(1))
    assert lost(reader.read()) == [0.0]
    log.failing = [errno.EPIPE]
    log.write(raw(40, XID_79), raw(41))
    found = list(reader.read())
    assert len(events(found)) == 1
    assert lost(found) == [38.0]
    assert [each.entity for each in found if each.check == "observations_dropped"] == ["sensor/kmsg"]
    assert lost(reader.read()) == []


def test_a_flood_that_overwrites_faster_than_the_sensor_reads_does_not_blind_it(log: Log) -> None:
    reader = sensor(log)
    log.write(raw(1))
    reader.read()
    log.failing = [errno.EPIPE] * (MAX_RECORDS - 1)
    log.write(raw(50_000, XID_79))
    assert len(events(reader.read())) == 1
    assert reader.lost == 49_998


@pytest.mark.parametrize("end", [errno.EIO, 0])
def test_records_read_before_a_log_failed_or_ended_are_reported(log: Log, end: int) -> None:
    def read(fd: int, size: int) -> bytes:
        if pieces:
            return pieces.pop(0)
        if end:
            raise OSError(end, os.strerror(end))
        return b""

    pieces = [raw(1), raw(2, XID_79)]
    reader = KmsgSensor(CLOCK, LINES, opener=log.open, reader=read)
    reader.open()
    assert len(events(reader.read())) == 1
    with pytest.raises(Unavailable):
        reader.read()
    reader.close()


def test_records_overwritten_between_two_reads_count_as_lost(log: Log) -> None:
    reader = sensor(log, KmsgCursor(BOOT, 10))
    log.write(raw(100))
    reader.read()
    assert reader.lost == 89


def test_records_lost_before_the_first_read_do_not_count(log: Log) -> None:
    reader = sensor(log)
    log.write(raw(100_000))
    reader.read()
    assert reader.lost == 0


def test_a_record_that_is_too_large_is_skipped_and_counted(log: Log) -> None:
    reader = sensor(log)
    log.write(raw(1))
    reader.read()
    log.failing = [errno.EINVAL]
    log.write(raw(3, XID_79))  # the kernel has gone past record 2
    assert len(events(reader.read())) == 1
    assert reader.lost == 1


def test_an_oversized_record_that_was_read_before_causes_no_other_loss(log: Log) -> None:
    reader = sensor(log, KmsgCursor(BOOT, 10))
    log.failing = [errno.EINVAL]
    log.write(raw(5), raw(11, XID_79))
    assert len(events(reader.read())) == 1
    assert reader.lost == 0


def test_the_count_is_reported_repeatedly_so_that_it_can_clear(log: Log) -> None:
    class Slow(Clock):
        s = 0.0

        def now_s(self) -> float:
            return self.s

    clock = Slow(Anchor(BOOT, 0.0))
    reader = sensor(log, clock=clock)
    told = []
    for clock.s in (0.0, 10.0, 29.0, 30.0, 40.0, 60.0):
        told += lost(reader.read())
    assert told == [0.0, 0.0, 0.0]


def test_a_log_that_fails_or_ends_is_unavailable(log: Log) -> None:
    reader = sensor(log)
    log.failing = [errno.EIO]
    with pytest.raises(Unavailable, match="Input/output error"):
        reader.read()
    log.failing = [errno.EINVAL] * 1000
    with pytest.raises(Unavailable, match="Invalid argument"):
        reader.read()
    log.failing = []
    log.mine.close()
    with pytest.raises(Unavailable, match="ended"):
        reader.read()


def test_the_error_names_the_missing_privilege_and_the_alternative(tmp_path: Path) -> None:
    def refused() -> int:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    with pytest.raises(Unavailable, match=r"Operation not permitted.*privileged.*journal"):
        KmsgSensor(CLOCK, LINES, opener=refused).open()
    with pytest.raises(Unavailable, match="No such file"):
        KmsgSensor(CLOCK, LINES, path=tmp_path / "kmsg").open()


def test_the_descriptor_is_closed_once() -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    reader = sensor(Script([]))
    reader.open()
    reader.close()
    reader.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_one_call_reads_at_most_its_share() -> None:
    script = Script(raw(seq) for seq in range(3 * MAX_RECORDS))
    reader = sensor(script)
    reader.read()
    assert reader.cursor == KmsgCursor(BOOT, MAX_RECORDS - 1)


def test_the_buffer_holds_the_longest_record_of_the_kernel() -> None:
    assert BUFFER_BYTES >= 8192


def test_a_flood_of_one_fault_does_not_hide_another() -> None:
    script = Script(
        raw(n, IMPORTANT[n // 100 % 20] if n % 100 == 0 else XID_79, at_s=1.0) for n in range(2000)
    )
    reader = sensor(script)
    found = events(reader.read())
    assert {each.entity for each in found} >= {f"nvswitch/0000:0{n}:00.0" for n in range(4)}
    assert len(found) == len(IMPORTANT) + 1

from __future__ import annotations

from pathlib import Path

from supervisor.observability import status
from supervisor.observability.bookkeeping import Bookkeeping
from supervisor.observability.publisher import StatusPublisher
from supervisor.store.run_directory import RunDir
from tests.unit.supervisor.job_views import view
from tests.unit.supervisor.observability.test_status import seen
from tests.unit.supervisor.status_samples import incident


def test_an_incident_that_did_not_fit_is_written_once_there_is_space(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    publisher = StatusPublisher(run)
    now = view()

    def turn() -> None:
        publisher.publish(now, Bookkeeping(now.now_ns, None))
        publisher.files.do(lambda: None, 30.0)

    (tmp_path / "incidents").write_bytes(b"")  # not even root can create a file below a file
    for number in (1, 2):
        for open_ in (True, False):
            publisher.incident(incident(number, open=open_))
    turn()
    assert run.incident(1) is None
    (tmp_path / "incidents").unlink()
    (tmp_path / "incidents").mkdir()
    turn()
    for number in (1, 2):
        assert run.incident(number) == incident(number, open=False)
    (tmp_path / "incidents" / "i-0001.json").unlink()
    turn()
    assert run.incident(1) is None, "the incident must be written once"


def test_equal_arguments_build_equal_statuses_and_building_one_changes_nothing() -> None:
    now = seen(0.03, 0.09)
    accounts, context = Bookkeeping(0, None), status.StatusContext("a-run", 1.0, 7, known={"loss": 0.25})
    before = accounts.ledger.snapshot()
    assert status.build(now, accounts, context) == status.build(now, accounts, context)
    assert accounts.ledger.snapshot() == before
    assert status.build(now, accounts, context)["supervisor_pid"] == 7


def test_a_published_status_does_not_change_with_the_next_one(tmp_path: Path) -> None:
    publisher = StatusPublisher(RunDir(tmp_path))
    assert publisher.published == {}
    publisher.publish(seen(0.03, 0.09), Bookkeeping(0, None))
    first, copy = publisher.published, dict(publisher.published)
    publisher.publish(view(), Bookkeeping(0, None), "in the way")
    publisher.files.do(lambda: None, 30.0)
    assert first == copy
    assert (first["volume_error"], publisher.published["volume_error"]) == ("", "in the way")


def test_an_incident_is_counted_once_and_only_when_it_is_over(tmp_path: Path) -> None:
    publisher = StatusPublisher(RunDir(tmp_path))

    def counted() -> float | None:
        publisher.publish(view(), Bookkeeping(0, None))
        return publisher.measured().registry.get_sample_value("holdfast_incidents_total", {"kind": "crash"})

    for open_, count in ((True, 0.0), (False, 1.0), (False, 1.0)):
        publisher.incident(incident(1, kind="crash", open=open_))
        assert (counted(), counted()) == (count, count)
    publisher.files.do(lambda: None, 30.0)

"""The demo's runs are long enough, and its summary counts the right recoveries."""

from __future__ import annotations

import signal

import pytest

from supervisor.cli.on_cluster.demo import course
from supervisor.cli.on_cluster.demo.course import ClusterScenario
from supervisor.cli.on_cluster.demo.interruption import Interrupted, Interruption
from tests.unit.supervisor.status_samples import incident

STALE_STEPS = 50  # a status is at most 5 s old, at ten steps a second


@pytest.mark.parametrize("show", [course.WHOLE, course.QUICK])
def test_the_faults_are_over_before_the_training_is(show: ClusterScenario) -> None:
    assert show.steps > (show.apart + STALE_STEPS) * len(show.faults)
    assert show.args[1:3] == (f"--steps={show.steps}", f"--pace={show.pace_s}")


def test_a_pod_that_kubernetes_had_to_replace_is_not_a_recovery_in_place() -> None:
    found = [
        incident(kind="crash", recovered_s=0.5),
        incident(kind="hang", recovered_s=2.0),
        incident(kind="member_lost", recovered_s=25.0),
    ]
    assert course.in_place(found) == "the 2 recoveries without a new pod took 2.5 s in total"


def test_a_signal_ends_the_demo_only_at_a_check_and_the_handlers_are_restored() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Interruption() as stop:
        stop.check()
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Interrupted):
            stop.pause(0.0)
    assert signal.getsignal(signal.SIGTERM) is before


def test_nohup_is_respected() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interruption():
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)

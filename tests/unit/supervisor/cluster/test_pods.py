"""Pods become members under unique names, and the supervisor deletes a pod only when it must."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from supervisor.cluster.adoption import pod_facts
from supervisor.cluster.adoption.tolerations import Toleration
from supervisor.cluster.pods import (
    RESTART_S,
    REVIVE_S,
    JobEnd,
    PodBackend,
    PodMember,
    first_start,
    held_policy,
    member_name,
    read_pod,
)
from supervisor.cluster.reach import OutOfReach, Reach, out_of_reach
from supervisor.controller.backend import Backend
from supervisor.view.model import Departure, StopRequest

Json = dict[str, Any]


@dataclass
class Cluster:
    """A backend, and a record of its requests."""

    now_s: float = 100.0
    deleted: list[str] = field(default_factory=list)
    dismissed: list[str] = field(default_factory=list)
    stops: list[StopRequest] = field(default_factory=list)
    responding: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.backend = PodBackend(
            lambda pod: self.deleted.append(pod.member),
            self.dismissed.append,
            self.stops.append,
            lambda: self.now_s,
            responds=self.responding.__contains__,
        )


def running(number: int, restarts: int = 0, **given: Any) -> PodMember:
    uid, name = f"{number:08x}-0000", f"w-{number}"
    made = PodMember(uid, name, member_name(name, uid, restarts), "n0", f"c{restarts}", is_running=True)
    return replace(made, **given)


def pod(state: Json | None = None, restarts: int = 0, phase: str = "Running", **metadata: Any) -> Json:
    """Return a pod as the API server sends it; `state` is that of its training container."""
    found: Json = {
        "metadata": {"name": "w-0", "uid": "abcdef01-2345", **metadata},
        "spec": {"nodeName": "n7"},
        "status": {"phase": phase},
    }
    if state is not None:
        train = {"name": "train", "state": state, "restartCount": restarts, "containerID": "containerd://9"}
        found["status"]["containerStatuses"] = [{"name": "logs", "restartCount": 5}, train]
    return found


# -- pods whose deletion is requested


def test_a_withdrawn_pod_is_no_member_that_can_train_and_is_not_leaving() -> None:
    backend = Cluster().backend
    first, standby = running(0), running(1, is_standby=True)
    backend.update((first, standby))
    backend.withdraw(standby.uid, True)
    backend.update((first, standby))
    assert set(backend.members) == {first.member}
    backend.update((replace(first, is_leaving=True), standby))
    assert not backend.stop, "the request may be refused, and the run goes on with the standby"
    backend.update((first, standby))
    backend.withdraw(standby.uid, False)
    assert set(backend.members) == {first.member, standby.member}


# -- reading a pod


def test_a_pod_whose_training_container_runs_is_a_member() -> None:
    assert read_pod(pod({"running": {}}), "train") == PodMember(
        "abcdef01-2345", "w-0", "w-0.abcdef01", "n7", "containerd://9", is_running=True
    )


@pytest.mark.parametrize(
    ("stated", "address"), [("10.0.0.7", "10.0.0.7"), (None, ""), ("", ""), (7, ""), (["10.0.0.7"], "")]
)
def test_the_address_of_a_pod_is_read_if_it_is_text(stated: object, address: str) -> None:
    found = pod({"running": {}})
    found["status"]["podIP"] = stated
    assert read_pod(found, "train").address == address


@pytest.mark.parametrize("status", [None, {}, {"phase": "Pending"}, {"containerStatuses": None}])
def test_a_pod_that_has_not_started_is_known_and_not_running(status: Json | None) -> None:
    found = pod()
    found["status"] = status
    found["spec"] = None
    read = read_pod(found, "train")
    assert (read.member, read.node, read.container_id) == ("w-0.abcdef01", "", "")
    assert (read.is_running, read.has_ended, read.is_leaving) == (False, False, False)


@pytest.mark.parametrize("state", [{"waiting": {}}, {"terminated": {}}, {}, None])
def test_a_container_that_is_dead_or_waiting_is_not_running(state: Json | None) -> None:
    found = pod({})
    found["status"]["containerStatuses"][1]["state"] = state
    assert not read_pod(found, "train").is_running


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
def test_a_pod_that_has_ended_runs_nothing(phase: str) -> None:
    """The kubelet of a lost node cannot report that its containers are dead."""
    read = read_pod(pod({"running": {}}, phase=phase), "train")
    assert (read.has_ended, read.is_running) == (True, False)


@pytest.mark.parametrize(
    ("phase", "state", "code", "said"),
    [
        ("Failed", {"terminated": {"exitCode": 2, "message": "no such\nscript\n"}}, 2, "no such script"),
        ("Failed", {"terminated": {"exitCode": 0}}, 1, ""),
        ("Failed", None, 1, ""),
        ("Succeeded", {"terminated": {"exitCode": 0, "message": "x" * 4_000}}, 0, "x" * 300),
        ("Running", {"terminated": {"exitCode": 2, "message": "no"}}, None, ""),
    ],
)
def test_a_pod_that_has_ended_has_an_exit_code(
    phase: str, state: Json | None, code: int | None, said: str
) -> None:
    """A pod in which another container fails, or that is evicted, has failed too."""
    found = read_pod(pod(state, phase=phase), "train")
    assert (found.exit_code, found.last_words) == (code, said)


def test_what_announces_the_end_of_a_pod_is_read() -> None:
    found = pod({"running": {}}, deletionTimestamp="2026-11-25T00:00:00Z", deletionGracePeriodSeconds=30)
    found["spec"]["tolerations"] = [{"key": "gpu", "operator": "Exists", "tolerationSeconds": 60}]
    disrupted = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}
    found["status"]["conditions"] = [{"type": "Ready", "status": "True"}, disrupted]
    for each in (found, pod_facts.kept(found)):
        read = read_pod(each, "train")
        assert (read.grace_s, read.disruption) == (30.0, "PreemptionByScheduler")
        assert read.tolerations == (Toleration("gpu", "Exists", seconds=60.0),)
    assert not read_pod(pod({"running": {}}, deletionGracePeriodSeconds=30), "train").grace_s
    disrupted["status"] = "False"
    assert read_pod(found, "train").disruption == ""


@pytest.mark.parametrize(
    ("given", "ends"),
    [({}, False), ({"is_leaving": True}, True), ({"disruption": "TerminationByKubelet"}, True)],
)
def test_the_kubelet_has_asked_a_deleted_pod_or_one_that_it_ends_itself_to_end(
    given: Json, ends: bool
) -> None:
    assert running(0, **given).is_ending is ends
    assert not running(0, disruption="PreemptionByScheduler").is_ending


def test_a_pod_that_is_being_deleted_is_leaving() -> None:
    found = read_pod(pod({"running": {}}, deletionTimestamp="2026-11-25T00:00:00Z"), "train")
    assert (found.is_leaving, found.is_running) == (True, True)


@given(
    st.lists(
        st.tuples(st.sampled_from(["w-0", "w-1", "w"]), st.integers(0, (1 << 32) - 1), st.integers(0, 30)),
        unique=True,
    )
)
def test_the_name_of_a_member_is_never_reused(lives: list[tuple[str, int, int]]) -> None:
    """A pod has a unique uid, and a container counts its restarts."""
    names = [
        read_pod(pod({"running": {}}, restarts, name=name, uid=f"{uid:08x}-0000-4000-8000-0"), "train").member
        for name, uid, restarts in lives
    ]
    assert len(set(names)) == len(lives)
    assert all(len(name) < 64 for name in names)


# -- the members


def test_the_members_are_the_running_pods() -> None:
    there = Cluster()
    dead, ended = running(1, is_running=False), running(2, is_running=False, has_ended=True)
    assert there.backend.update([running(0), dead, ended])
    assert list(there.backend.members) == [running(0).member]
    assert there.backend.member_of(dead.uid) == dead.member
    assert there.backend.member_of("unknown") is None
    assert not there.backend.update([running(0), dead])
    assert there.backend.update([running(0, 1), dead]), "its container was started again"


def test_a_leaving_pod_is_not_a_member_unless_all_pods_leave() -> None:
    there = Cluster()
    stay, leave = running(0), running(1, is_leaving=True)
    there.backend.update([stay, leave])
    assert list(there.backend.members) == [stay.member]
    assert (there.backend.is_leaving, there.backend.stop) == (False, "")
    there.backend.update([replace(stay, is_leaving=True), leave])
    assert list(there.backend.members) == [stay.member, leave.member]
    assert (there.backend.is_leaving, there.backend.stop) == (True, "terminate")


def test_pods_that_have_ended_do_not_prevent_the_others_from_leaving() -> None:
    there = Cluster()
    ended = running(0, is_running=False, has_ended=True)
    there.backend.update([ended, running(1, is_leaving=True)])
    assert there.backend.stop == "terminate"
    there.backend.update([ended])
    assert not there.backend.stop


def test_a_users_request_takes_precedence_over_leaving_pods() -> None:
    there = Cluster()
    there.backend.record_stop("now")
    there.backend.record_stop("now")
    there.backend.update([running(0, is_leaving=True)])
    assert there.backend.stop == "now"
    assert there.stops == ["now"], "the stop must be recorded once"


def test_the_end_of_the_job_is_stored_for_later_queries() -> None:
    there = Cluster()
    backend: Backend = there.backend
    backend.finish(3, "rank 1 failed", "see above", None)
    assert there.backend.ended == JobEnd(3, "rank 1 failed", "see above")
    assert backend.volume_error == ""
    backend.renew("w-0")


def test_pods_that_the_kubelet_ends_are_leaving_too() -> None:
    there = Cluster()
    there.backend.update([running(0, disruption="TerminationByKubelet"), running(1, is_leaving=True)])
    assert there.backend.stop == "terminate"
    there.backend.update([running(0, disruption="EvictionByEvictionAPI"), running(1, is_leaving=True)])
    assert not there.backend.is_leaving


def test_a_leaving_pod_is_about_to_end_unless_all_pods_leave() -> None:
    there = Cluster()
    stay, leave = running(0), running(1, is_leaving=True)
    departure = Departure("its pod is being deleted", 0, has_begun=True)
    there.backend.update([stay, leave])
    assert there.backend.announce({leave.member: departure})
    assert not there.backend.announce({leave.member: departure})
    assert there.backend.departures == {leave.member: departure}
    there.backend.update([replace(stay, is_leaving=True), leave])
    assert there.backend.departures == {}


# -- giving a member up


def test_a_lost_member_whose_container_seems_to_run_eventually_has_its_pod_deleted() -> None:
    there = Cluster()
    lost = running(0)
    there.backend.update([lost, running(1)])
    there.backend.end_member(lost.member)
    for passed_s, deleted in ((0.0, 0), (RESTART_S - 0.1, 0), (0.1, 1), (1.0, 1), (RESTART_S, 2)):
        there.now_s += passed_s
        there.backend.want(2, (lost.member,))
        assert there.deleted == [lost.member] * deleted


def test_a_leaving_pod_is_ordered_to_end_its_ranks_and_others_are_not() -> None:
    there = Cluster()
    stay, leave = running(0), running(1, is_leaving=True)
    there.backend.update([stay, leave])
    there.backend.end_member(stay.member)
    there.backend.end_member(leave.member)
    there.backend.end_member("unknown")
    assert there.dismissed == [leave.member]


def test_a_lost_member_whose_pod_is_evicted_later_is_ordered_to_end_and_evicted_only_once() -> None:
    """It was cut off, so its ranks still run. Its launcher would wait for an order as long as the pod may."""
    there = Cluster()
    lost, other = running(0), running(1)
    there.backend.update([lost, other])
    there.backend.end_member(lost.member)
    there.now_s += RESTART_S
    there.backend.want(2, (lost.member,))
    assert (there.deleted, there.dismissed) == ([lost.member], [])
    there.backend.update([replace(lost, is_leaving=True), other])
    there.responding.add(lost.member)
    there.now_s += RESTART_S
    there.backend.want(2, (lost.member,))
    assert (there.deleted, there.dismissed) == ([lost.member], [lost.member])


def test_an_unknown_or_missing_member_deletes_nothing() -> None:
    there = Cluster()
    there.backend.update([running(0)])
    there.backend.end_member(running(0).member)
    there.now_s += 2 * RESTART_S
    there.backend.update([running(0, 1)])
    there.backend.want(2, (running(0).member, "unknown"))
    there.backend.update([])
    there.backend.want(2, (running(0, 1).member,))
    assert there.deleted == []


_STEPS = st.lists(
    st.sampled_from(["kill 0", "kill 1", "restart 0", "restart 1", "die 0", "revive 0", "leave 1", "gone 1"])
    | st.floats(0.0, RESTART_S),
    max_size=40,
)


@settings(max_examples=60)
@given(_STEPS)
def test_no_pod_is_deleted_early_or_after_its_container_was_started_again(steps: list[Any]) -> None:
    there = Cluster()
    pods: dict[int, PodMember] = {0: running(0), 1: running(1)}
    restarts, lost_s = {0: 0, 1: 0}, dict[str, float]()
    for each in steps:
        if isinstance(each, float):
            there.now_s += each
        else:
            what, number = each.split()
            _happen(there, pods, restarts, lost_s, what, int(number))
        there.backend.update(pods.values())
        before = list(there.deleted)
        there.backend.want(2, tuple(lost_s))
        for member in there.deleted[len(before) :]:
            (found,) = [pod for pod in pods.values() if pod.member == member]
            assert found.is_running
            assert there.now_s - lost_s[member] >= RESTART_S
            lost_s[member] = there.now_s


def _happen(
    there: Cluster,
    pods: dict[int, PodMember],
    restarts: dict[int, int],
    lost_s: dict[str, float],
    what: str,
    number: int,
) -> None:
    pod = pods.get(number)
    if pod is None:
        return
    if what == "kill":
        lost_s.setdefault(pod.member, there.now_s)
        there.backend.end_member(pod.member)
    elif what == "restart":
        restarts[number] += 1
        pods[number] = running(number, restarts[number], is_leaving=pod.is_leaving)
    elif what in ("die", "revive"):
        pods[number] = replace(pod, is_running=what == "revive")
    elif what == "leave":
        pods[number] = replace(pod, is_leaving=True)
    else:
        del pods[number]


def test_a_lost_member_that_responds_again_is_a_new_member_and_its_pod_is_kept() -> None:
    """It may hold the only snapshot, so evicting its pod could lose the state."""
    cluster = Cluster()
    backend, (first, second) = cluster.backend, (running(1), running(2))
    backend.update([first, second])
    backend.end_member(first.member)
    cluster.responding.add(first.member)
    backend.want(2, (first.member,))
    assert set(backend.members) == {first.member, second.member}, "the loss is still being handled"
    cluster.now_s += REVIVE_S
    backend.want(2, (first.member,))
    revived = f"{first.member}-1"
    assert set(backend.members) == {revived, second.member}
    assert backend.member_of(first.uid) == revived
    cluster.now_s += RESTART_S
    backend.update([first, second])
    backend.want(2, (first.member,))
    assert cluster.deleted == []
    assert set(backend.members) == {revived, second.member}, (
        "the name must stay the same when the pod is read again"
    )


def test_a_revived_member_that_is_lost_again_is_a_third_one_or_its_pod_is_deleted() -> None:
    cluster = Cluster()
    backend, only = cluster.backend, running(1)
    backend.update([only])
    lost = [only.member]
    for number in (1, 2):
        cluster.responding = {lost[-1]}
        cluster.backend.responds = cluster.responding.__contains__
        backend.want(1, tuple(lost))
        cluster.now_s += REVIVE_S
        backend.want(1, tuple(lost))
        assert list(backend.members) == [f"{only.member}-{number}"]
        lost += backend.members
    cluster.backend.responds = lambda _: False
    backend.want(1, tuple(lost))
    cluster.now_s += RESTART_S
    backend.want(1, tuple(lost))
    assert cluster.deleted == [f"{only.member}-2"]


def test_no_pod_is_evicted_while_evictions_are_blocked_nor_soon_after() -> None:
    """The supervisor itself may be cut off. Once it is reachable again, members need time to connect."""
    there = Cluster()
    blocked = ["this supervisor may be cut off"]
    there.backend.blocked = lambda: blocked[0]
    lost = running(0)
    there.backend.update([lost, running(1)])
    there.backend.end_member(lost.member)
    for _ in range(20):
        there.now_s += RESTART_S
        there.backend.want(2, (lost.member,))
    assert there.deleted == []
    blocked[0] = ""
    for passed_s, deleted in ((0.0, 0), (RESTART_S - 0.1, 0), (0.1, 1)):
        there.now_s += passed_s
        there.backend.want(2, (lost.member,))
        assert there.deleted == [lost.member] * deleted


@pytest.mark.parametrize(
    ("reaches", "everything", "namespaces"),
    [
        ("", False, ""),
        ("a:0/0", False, ""),
        ("a:1/2", False, ""),
        ("a:0/1", True, ""),
        ("a:1/3", True, ""),
        ("a:0/2 a:8/8", False, ""),
        ("a:0/8 a:2/2", False, ""),  # one large job does not decide
        ("a:0/1 a:0/1 a:9/9", True, "a"),
        ("a:0/1 a:0/1 a:0/1 b:1/1", False, "a"),  # nor does one namespace with many jobs
        ("a:0/1 a:0/1 b:1/1 c:1/1", False, "a"),
        ("a:0/9 b:1/1", False, ""),  # a single job may itself be at fault
        ("a:0/1 b:0/1 c:1/1", True, ""),
        ("a:0/0 b:0/0 c:1/1", False, ""),  # members that never connected do not count
        ("a:0/1 a:0/1 b:0/1 c:0/2 c:0/1", True, "ac"),
    ],
)
def test_the_jobs_show_whether_the_supervisor_is_cut_off(
    reaches: str, everything: bool, namespaces: str
) -> None:
    found = []
    for each in reaches.split():
        namespace, connected, known = each.replace("/", ":").split(":")
        found.append((namespace, Reach(int(known), int(connected))))
    assert out_of_reach(found) == OutOfReach(everything, frozenset(namespaces))
    for namespace in "abc":
        assert out_of_reach(found).includes(namespace) == (everything or namespace in namespaces)


@pytest.mark.parametrize("pod", ["w-0", "w-0.12345678", "a.b-1", "w"])
@pytest.mark.parametrize("uid", ["0123abcd-9", "12345678-0", "uid-pod-w"])
def test_the_first_start_of_a_members_pod_follows_from_its_name(pod: str, uid: str) -> None:
    first = member_name(pod, uid, 0)
    for later in (first, member_name(pod, uid, 7), f"{first}-2", f"{member_name(pod, uid, 12)}-3"):
        assert first_start(later) == first


def test_a_job_has_storage_only_if_its_pods_name_a_place_that_outlives_them() -> None:
    assert not held_policy({}, 2, 1).has_storage
    assert not held_policy({"grace": "9s"}, 2, 1).has_storage
    assert held_policy({"checkpoints": "pvc://claim"}, 2, 1).has_storage


# -- addresses

OWN = {"podIP": "10.0.0.7", "podIPs": [{"ip": "10.0.0.7"}, {"ip": "fd00::7"}]}


def placed(status: Json) -> PodBackend:
    """Return a job with one pod of this status."""
    found = pod({"running": {}})
    found["status"] |= status
    backend, member = Cluster().backend, read_pod(found, "train")
    assert member is not None
    backend.update([member])
    return backend


@pytest.mark.parametrize(
    ("status", "peer_url"),
    [
        (OWN, "http://10.0.0.7:8470"),
        (OWN, "https://10.0.0.7:8470"),
        (OWN, "http://[fd00::7]:8470"),
        (OWN, "http://[FD00:0:0::0007]:8470"),
        (OWN, "http://[::ffff:10.0.0.7]:8470"),
        ({"podIP": "fd00:0::7"}, "http://[fd00::7]:8470"),
        ({"podIP": "fe80::7"}, "http://[fe80::7%eth0]:8470"),
        (OWN, ""),  # the sidecar does not listen yet
        ({}, "http://10.0.0.8:8470"),
        ({"podIP": 7}, "http://10.0.0.8:8470"),
    ],
)
def test_a_member_may_report_any_address_of_its_pod_and_every_address_while_none_is_known(
    status: Json, peer_url: str
) -> None:
    assert placed(status).why_not_at("abcdef01-2345", peer_url) == ""
    assert placed(status).why_not_at("another", peer_url) == ""


@pytest.mark.parametrize(
    ("peer_url", "host"),
    [
        ("http://10.0.0.8:8470", "10.0.0.8"),
        ("http://[fd00::8]:8470", "fd00::8"),
        ("http://elsewhere:8470", "elsewhere"),
        ("http://10.0.0.7:8470@elsewhere:80", "http://10.0.0.7:8470@elsewhere:80"),
        ("http://10.0.0.7:x@elsewhere:80", "http://10.0.0.7:x@elsewhere:80"),
        ("http://10.0.0.7", "http://10.0.0.7"),
        ("http://[::1", "http://[::1"),
        ("file://10.0.0.7:1", "file://10.0.0.7:1"),
    ],
)
def test_a_member_may_not_report_an_address_that_its_pod_does_not_have(peer_url: str, host: str) -> None:
    why = placed(OWN).why_not_at("abcdef01-2345", peer_url)
    assert why == (f"member w-0.abcdef01 reports the address {host!r}, but its pod has 10.0.0.7, fd00::7")

from __future__ import annotations

import copy

import pytest

from supervisor.admission.pod_layout import MAX_JOB_RANKS
from supervisor.cluster.adoption import owner_size
from supervisor.cluster.adoption.job_membership import (
    Adopted,
    GroupFacts,
    JobKey,
    NotAdopted,
    OwnerReference,
    PlaceInJob,
    adopt,
    job_key,
    place_of,
    queue_label,
    read_group,
    top_owner,
)
from supervisor.cluster.adoption.pod_facts import kept
from tests.unit.supervisor.cluster.adoption.workloads import (
    COMPLETION,
    Json,
    adopted,
    chain,
    job_of,
    key_of,
    kubeflow,
    kubeflow_pod,
    made,
    pod,
    reference_to,
    refused,
)


def test_a_standby_pod_created_by_holdfast_belongs_to_the_job_of_its_supervision() -> None:
    job = made("batch/v1", "Job", "llama", {"parallelism": 2})
    supervision = made("holdfast.dev/v1alpha1", "Supervision", "llama", by=job)
    del supervision["metadata"]["ownerReferences"][0]["controller"]
    assert adopted(pod("llama-standby-1", supervision), supervision, job).key == job_of(job)


def test_an_owner_above_the_kinds_of_the_table_is_not_looked_up() -> None:
    cron = made("batch/v1", "CronJob", "nightly")
    job = made("batch/v1", "Job", "nightly-2911", {"parallelism": 2}, cron)
    looked_up: list[OwnerReference] = []
    member = pod("nightly-2911-x7k2p", job)

    def look_up(each: OwnerReference) -> Json:
        looked_up.append(each)
        return job

    owners = top_owner(member, look_up)
    assert [each.kind for each in looked_up] == ["Job"]
    assert owners.beyond == key_of(cron)
    assert adopted(member, job).key == job_of(job)


def test_pods_of_an_unknown_kind_are_a_job_if_they_state_their_number() -> None:
    owner = made("example.com/v1", "TrainingRun", "llama")
    assert "says how many members" in refused(pod("a", owner))
    says = {"holdfast.dev/members": "2"}
    assert adopted(pod("a", owner, {}, says)).key == job_of(owner)
    assert adopted(pod("a", owner, {}, {**says, "holdfast.dev/group": "both"})).key == JobKey("team", "both")


def test_an_owner_of_unknown_kind_that_does_not_control_the_pod_is_ignored() -> None:
    member = pod("a", made("v1", "ConfigMap", "settings"))
    del member["metadata"]["ownerReferences"][0]["controller"]
    assert refused(member) == "the pod has neither an owner nor holdfast.dev/group"


def test_an_owner_that_must_be_looked_up_is_named() -> None:
    jobset = made("jobset.x-k8s.io/v1alpha2", "JobSet", "llama")
    job = made("batch/v1", "Job", "llama-w-0", {"parallelism": 2}, jobset)
    member = pod("llama-w-0-1", job)
    found = adopt(member, chain(member, job), ())
    assert found == NotAdopted("JobSet team/llama cannot be read", key_of(jobset))


def test_an_owner_that_was_replaced_by_one_of_the_same_name_is_not_the_owner() -> None:
    job = made("batch/v1", "Job", "llama", {"parallelism": 2})
    member = pod("a", job)
    newer = copy.deepcopy(job)
    newer["metadata"]["uid"] = "another"
    owners = top_owner(member, {key_of(job): newer}.get)
    assert owners.unread == key_of(job)
    assert "it was replaced" in owners.why


def test_owners_in_a_circle_are_refused() -> None:
    first, second = made("v1", "Pod", "first"), made("v1", "Pod", "second")
    for child, owner in ((first, second), (second, first)):
        child["metadata"]["ownerReferences"] = [reference_to(owner)]
    assert "cycle" in refused(pod("a", first), first, second)


def test_a_chain_of_too_many_owners_is_refused() -> None:
    pods = [made("v1", "Pod", "p0")]
    for number in range(1, 10):
        pods.append(made("v1", "Pod", f"p{number}", by=pods[-1]))
    assert "more than 8" in refused(pod("a", pods[-1]), *pods)


def test_a_name_that_would_change_a_url_is_never_looked_up() -> None:
    member = pod("a", made("batch/v1", "Job", "../../secrets/x"))
    owners = top_owner(member, lambda each: pytest.fail(f"looked up {each}"))
    assert "name in ownerReferences" in owners.why


def test_pods_made_before_and_after_an_upgrade_of_the_owners_api_belong_to_one_job() -> None:
    before = made("jobset.x-k8s.io/v1alpha2", "JobSet", "llama")
    after = {**before, "apiVersion": "jobset.x-k8s.io/v1"}
    keys = [job_key(pod(name, by), chain(pod(name, by), by)) for name, by in (("a", before), ("b", after))]
    assert keys[0] == keys[1] == job_of(before)


def test_the_group_size_of_kueue_is_ignored_for_pods_with_an_owner() -> None:
    job = made("batch/v1", "Job", "llama", {"parallelism": 2})
    counts = "kueue.x-k8s.io/pod-group-total-count"
    group = tuple(pod(name, job, {}, {counts: count}) for name, count in (("a", "2"), ("b", "3")))
    assert adopted(group[0], job, group=group).members == 2


def test_two_controlling_owners_are_refused() -> None:
    jobs = [made("batch/v1", "Job", name, {"parallelism": 1}) for name in ("a", "b")]
    member = pod("a-0", jobs[0])
    member["metadata"]["ownerReferences"].append(reference_to(jobs[1]))
    assert refused(member, *jobs) == "Job team/a and Job team/b both own the pod"


def test_a_group_that_contradicts_the_owner_is_refused() -> None:
    job = made("batch/v1", "Job", "llama", {"parallelism": 2})
    assert adopted(pod("a", job, {}, {"holdfast.dev/group": "llama"}), job).key == job_of(job)
    why = refused(pod("a", job, {}, {"holdfast.dev/group": "other"}), job)
    assert why == "holdfast.dev/group is 'other', but the pod belongs to Job team/llama"


def test_annotated_members_take_precedence_over_the_owner_so_that_further_pods_are_standbys() -> None:
    job = made("batch/v1", "Job", "llama", {"parallelism": 5})
    assert adopted(pod("a", job, {}, {"holdfast.dev/members": "4"}, members=5), job).members == 4


@pytest.mark.parametrize(("replicas", "members"), [(1, 2), (3, 3), (6, 4)])
def test_an_elastic_range_is_limited_to_the_present_number_of_replicas(replicas: int, members: int) -> None:
    job = made("batch/v1", "Job", "llama", {"parallelism": replicas})
    assert adopted(pod("a", job, {}, {"holdfast.dev/members": "2:4"}), job).members == members
    assert adopted(pod("a", job, members="2:4"), job).members == members
    bare = tuple(pod(f"p{n}", None, {}, {"holdfast.dev/group": "g"}, members="2:4") for n in range(replicas))
    assert adopted(bare[0], group=bare).members == members


def test_the_members_of_the_command_count_if_nothing_else_gives_a_number() -> None:
    assert adopted(pod("a", None, {}, {"holdfast.dev/group": "g"}, members=3)).members == 3


def test_a_command_for_another_number_of_pods_than_the_owner_has_is_refused() -> None:
    job = made("batch/v1", "Job", "llama", {"parallelism": 4})
    why = refused(pod("a", job, members=2), job)
    mismatch = "the pod's command is for 2 pods, but Job team/llama has 4 that train"
    assert why == f"{mismatch}: correct it, or set holdfast.dev/members"


def test_pods_that_give_different_numbers_of_members_are_refused() -> None:
    says = {"holdfast.dev/group": "llama"}
    first = pod("a", None, {}, {**says, "holdfast.dev/members": "2"})
    second = pod("b", None, {}, {**says, "holdfast.dev/members": "3"})
    for member in (first, second):
        assert "holdfast.dev/members is 2 on pod a and 3 on pod b" in refused(first, group=(first, second))
        assert "holdfast.dev/members is" in refused(member, group=(second, first))


@pytest.mark.parametrize(("replicas", "nproc"), [(4_096, 9), (65, 512), (4_096, 8), (64, 512)])
def test_a_job_with_more_ranks_than_holdfast_supports_is_refused(replicas: int, nproc: int) -> None:
    job = made("batch/v1", "Job", "llama", {"parallelism": replicas})
    of = pod("a", job, nproc=nproc)
    if replicas * nproc <= MAX_JOB_RANKS:
        assert adopted(of, job).members == replicas
    else:
        size = f"the job has {replicas} members of {nproc} ranks each"
        assert refused(of, job) == f"{size}, more than the 32,768 ranks that Holdfast supports"


def test_pods_without_a_number_follow_those_that_give_one() -> None:
    says = {"holdfast.dev/group": "llama"}
    speaking, silent = pod("a", None, {}, {**says, "holdfast.dev/members": "2"}), pod("b", None, {}, says)
    assert adopted(silent, group=(speaking, silent)).members == 2


@pytest.mark.parametrize("members", ["3", "2:3"])
def test_one_annotated_pod_does_not_change_the_size_of_the_others(members: str) -> None:
    job = made("batch/v1", "Job", "llama", {"parallelism": 4})
    group = tuple(
        pod(f"llama-{n}", job, {}, {"holdfast.dev/members": members} if n == 2 else {}) for n in range(4)
    )
    for each in group:
        why = refused(each, job, group=group)
        assert why.startswith(f"holdfast.dev/members is {members} on some pods of the job, but pod llama-")
        assert why.endswith("lacks it, and the job would have 4 members without it")
    assert adopted(group[2], job, group=group[2:3]).members == 3, "all pods of this group have it"


@pytest.mark.parametrize(("parallelism", "command"), [(3, None), (4, 2)])
def test_pods_without_the_annotation_follow_it_if_the_number_is_the_same_or_unclear_without_it(
    parallelism: int, command: int | None
) -> None:
    job = made("batch/v1", "Job", "llama", {"parallelism": parallelism})
    speaking = pod("a", job, {}, {"holdfast.dev/members": "3"}, members=command)
    silent = pod("b", job, members=command)
    assert [adopted(each, job, group=(speaking, silent)).members for each in (speaking, silent)] == [3, 3]


def test_pods_with_different_numbers_of_ranks_are_refused() -> None:
    job = made("batch/v1", "Job", "llama", {"parallelism": 2})
    group = (pod("a", job, nproc=4), pod("b", job, nproc=8))
    assert "the number of ranks is 8 on pod b and 4 on pod a" in refused(group[1], job, group=group)
    assert "has 4 ranks, but other pods of its job have 8" in str(
        adopt(group[0], chain(group[0], job), GroupFacts(pods=2, nproc=8))
    )


@pytest.mark.parametrize(
    "end", [{"status": {"phase": "Failed"}}, {"deletionTimestamp": "2026-11-25T03:00:00Z"}]
)
def test_the_number_of_a_pod_that_has_ended_does_not_count(end: Json) -> None:
    says = {"holdfast.dev/group": "llama"}
    member = pod("a", None, {}, {**says, "holdfast.dev/members": "2"})
    ended = pod("b", None, {}, {**says, "holdfast.dev/members": "3"})
    ended["status"] |= end.get("status", {})
    ended["metadata"] |= {} if "status" in end else end
    assert adopted(member, group=(member, ended)).members == 2


def test_the_annotations_of_a_launcher_do_not_count_for_the_workers() -> None:
    owner = kubeflow("MPIJob", "mpiReplicaSpecs", Launcher=1, Worker=2)
    worker, launcher = kubeflow_pod(owner, "worker", 0), kubeflow_pod(owner, "launcher", 0)
    launcher["metadata"]["annotations"]["holdfast.dev/injected"] = '{"nproc": 1}'
    assert adopted(worker, owner, group=(worker, launcher)).members == 2
    assert read_group((worker, launcher), chain(worker, owner)) == GroupFacts(pods=1, nproc=4)


def test_a_large_job_is_read_once_for_all_its_pods() -> None:
    job = made("batch/v1", "Job", "llama", {"parallelism": 3})
    group = [pod(f"llama-{n}", job, {COMPLETION: str(n)}) for n in range(3)]
    said = read_group(group, chain(group[0], job))
    assert said == GroupFacts(pods=3, nproc=4)
    found = [adopt(each, chain(each, job), said) for each in group]
    assert [each.order for each in found if isinstance(each, Adopted)] == [(0,), (1,), (2,)]


def test_a_pod_has_a_place_in_its_job_even_if_it_is_not_injected() -> None:
    owner = made("apps/v1", "StatefulSet", "gpt", {"replicas": 3})
    found = pod("gpt-2", owner, {"apps.kubernetes.io/pod-index": "2"})
    del found["metadata"]["annotations"]["holdfast.dev/injected"]
    assert place_of(found, chain(found, owner)) == PlaceInJob(job_of(owner), (2,))
    assert place_of(kept(found), chain(found, owner)) == PlaceInJob(job_of(owner), (2,))
    assert isinstance(place_of(found, chain(found)), NotAdopted), "its owner is not known yet"


def test_a_pod_that_does_not_train_has_no_place_in_a_job() -> None:
    owner = kubeflow("TFJob", "tfReplicaSpecs", Worker=1, PS=1)
    found = place_of(kubeflow_pod(owner, "ps", 0), chain(kubeflow_pod(owner, "ps", 0), owner))
    assert isinstance(found, NotAdopted)


def test_kueues_queue_is_found_at_any_owner() -> None:
    job_set = made("jobset.x-k8s.io/v1alpha2", "JobSet", "gpt")
    inner = made("batch/v1", "Job", "gpt-workers-0", {"parallelism": 2}, by=job_set)
    found = pod("gpt-workers-0-0", inner)
    assert queue_label(chain(found, inner, job_set)) == ""
    job_set["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "team"}
    expected = "kueue.x-k8s.io/queue-name of JobSet team/gpt"
    assert queue_label(chain(found, inner, job_set)) == expected
    assert queue_label(chain(found, *map(owner_size.kept, (inner, job_set)))) == expected

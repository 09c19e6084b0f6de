from __future__ import annotations

from supervisor.cluster.adoption.job_membership import Adopted, JobKey, OwnerChain, job_key
from tests.unit.supervisor.cluster.adoption.workloads import (
    COMPLETION,
    DLROVER,
    JOBSET,
    LWS,
    NOT_OPTED_IN,
    OPTED_IN,
    TRAINING,
    Json,
    adopted,
    chain,
    job_of,
    kubeflow,
    kubeflow_pod,
    kueue_pod,
    made,
    pod,
    refused,
)


def test_the_pods_of_an_indexed_job_are_ordered_by_their_completion_index() -> None:
    job = made("batch/v1", "Job", "llama", {
        "completionMode": "Indexed", "parallelism": 4, "completions": 4, "template": OPTED_IN,
    })  # fmt: skip
    member = pod(
        "llama-2-x7k2p",
        job,
        {COMPLETION: "2", "batch.kubernetes.io/job-name": "llama", "job-name": "llama"},
        {COMPLETION: "2"},
        {"JOB_COMPLETION_INDEX": f"metadata.labels['{COMPLETION}']"},
    )
    assert adopted(member, job) == Adopted(job_of(job), 4, 4, (2,), "")


def test_the_pods_of_a_job_without_an_index_have_no_order() -> None:
    job = made("batch/v1", "Job", "llama", {"completionMode": "NonIndexed", "parallelism": 3})
    assert adopted(pod("llama-x7k2p", job, env={"RANK": "2", "WORLD_SIZE": "3"}), job).order == ()


def test_a_jobset_is_one_job_of_all_its_replicated_jobs_that_opt_in() -> None:
    def replicated(name: str, replicas: int, pods: int, template: Json) -> Json:
        spec = {"parallelism": pods, "completions": pods, "completionMode": "Indexed", "template": template}
        return {"name": name, "replicas": replicas, "template": {"spec": spec}}

    parts = [
        replicated("driver", 1, 1, NOT_OPTED_IN),
        replicated("leader", 1, 1, OPTED_IN),
        replicated("workers", 2, 4, OPTED_IN),
    ]
    jobset = made("jobset.x-k8s.io/v1alpha2", "JobSet", "llama", {"replicatedJobs": parts})
    job = made("batch/v1", "Job", "llama-workers-1", {"parallelism": 4, "completions": 4}, jobset)
    labels = {
        f"{JOBSET}jobset-name": "llama",
        f"{JOBSET}replicatedjob-name": "workers",
        f"{JOBSET}job-index": "1",
        f"{JOBSET}job-global-index": "3",
        COMPLETION: "2",
    }
    member = pod("llama-workers-1-2-x7k2p", job, labels, labels)
    assert adopted(member, job, jobset) == Adopted(job_of(jobset), 9, 4, (3, 2), "workers")
    labels[f"{JOBSET}replicatedjob-name"] = "driver"
    assert "trains with 'leader, workers'" in refused(pod("d", job, labels), job, jobset)


def test_a_pytorchjob_counts_master_and_workers_and_never_their_rank() -> None:
    owner = kubeflow("PyTorchJob", "pytorchReplicaSpecs", Master=1, Worker=3)
    env = {"RANK": "2", "WORLD_SIZE": "16", "PET_NODE_RANK": "2", "PET_NNODES": "4", "MASTER_PORT": "23456"}
    assert adopted(kubeflow_pod(owner, "worker", 1, **env), owner) == Adopted(
        job_of(owner), 4, 4, (1, 1), "worker"
    )
    master = kubeflow_pod(owner, "master", 0, RANK="0")
    master["metadata"]["labels"][f"{TRAINING}job-role"] = "master"
    assert adopted(master, owner).order == (0, 0)


def test_an_elastic_pytorchjob_has_as_many_members_as_replicas_at_present() -> None:
    owner = kubeflow("PyTorchJob", "pytorchReplicaSpecs", Worker=3)
    owner["spec"]["elasticPolicy"] = {"minReplicas": 1, "maxReplicas": 4, "rdzvBackend": "c10d"}
    member = kubeflow_pod(owner, "worker", 2, PET_NNODES="1:4", PET_RDZV_BACKEND="c10d")
    assert adopted(member, owner).members == 3
    owner["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"] = 4
    assert adopted(member, owner).members == 4


def test_only_the_workers_of_an_mpijob_of_the_training_operator_train() -> None:
    owner = kubeflow("MPIJob", "mpiReplicaSpecs", Launcher=1, Worker=2)
    member = kubeflow_pod(
        owner, "worker", 1, K_MPI_JOB_ROLE="worker", OMPI_MCA_orte_keep_fqdn_hostnames="true"
    )
    assert adopted(member, owner) == Adopted(job_of(owner), 2, 4, (1,), "worker")
    assert "'launcher', which does not train" in refused(kubeflow_pod(owner, "launcher", 0), owner)


def test_the_launcher_of_an_mpijob_v2beta1_belongs_to_it_through_a_job_and_does_not_train() -> None:
    owner = kubeflow("MPIJob", "mpiReplicaSpecs", Launcher=1, Worker=2)
    owner["apiVersion"] = "kubeflow.org/v2beta1"
    labels = {f"{TRAINING}operator-name": "mpi-operator", f"{TRAINING}job-name": "llama"}
    worker = pod("llama-worker-1", owner, {
        **labels, f"{TRAINING}job-role": "worker", f"{TRAINING}replica-index": "1",
    })  # fmt: skip
    assert adopted(worker, owner) == Adopted(job_of(owner), 2, 4, (1,), "worker")
    job = made("batch/v1", "Job", "llama-launcher", {"parallelism": 1, "completions": 1}, owner)
    launcher = pod("llama-launcher-x7k2p", job, {**labels, f"{TRAINING}job-role": "launcher"})
    assert "does not train" in refused(launcher, job, owner)
    assert job_key(launcher, chain(launcher, job, owner)) == job_of(owner)


def test_the_ps_and_the_evaluator_of_a_tfjob_do_not_train() -> None:
    owner = kubeflow("TFJob", "tfReplicaSpecs", Chief=1, PS=2, Worker=3, Evaluator=1)
    member = kubeflow_pod(owner, "worker", 2, TF_CONFIG='{"task": {"type": "worker", "index": 2}}')
    assert adopted(member, owner) == Adopted(job_of(owner), 4, 4, (2, 2), "worker")
    assert adopted(kubeflow_pod(owner, "chief", 0), owner).order == (0, 0)
    assert "'evaluator', which does not train" in refused(kubeflow_pod(owner, "evaluator", 0), owner)
    assert "'ps', which does not train" in refused(kubeflow_pod(owner, "ps", 1), owner)


def test_the_pods_of_a_statefulset_are_ordered_by_their_ordinal() -> None:
    owner = made("apps/v1", "StatefulSet", "llama", {"replicas": 3, "template": OPTED_IN})
    labels = {"statefulset.kubernetes.io/pod-name": "llama-2", "apps.kubernetes.io/pod-index": "2"}
    assert adopted(pod("llama-2", owner, labels), owner) == Adopted(job_of(owner), 3, 4, (2,), "")
    assert adopted(pod("llama-1", owner), owner).order == (1,)


def test_each_group_of_a_leaderworkerset_is_a_job_of_its_own() -> None:
    spec = {"replicas": 2, "leaderWorkerTemplate": {"size": 3, "workerTemplate": OPTED_IN}}
    lws = made("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", "llama", spec)
    leaders = made("apps/v1", "StatefulSet", "llama", {"replicas": 2}, lws)
    labels = {f"{LWS}name": "llama", f"{LWS}group-index": "1", f"{LWS}group-key": "5f3a"}
    env = {"LWS_GROUP_SIZE": "3", "LWS_LEADER_ADDRESS": "llama-1.llama.team"}
    leader = pod(
        "llama-1", leaders, {**labels, f"{LWS}worker-index": "0"}, env={**env, "LWS_WORKER_INDEX": "0"}
    )
    workers = made("apps/v1", "StatefulSet", "llama-1", {"replicas": 2, "ordinals": {"start": 1}}, leader)
    worker = pod(
        "llama-1-2", workers, {**labels, f"{LWS}worker-index": "2"}, {f"{LWS}leader-name": "llama-1"}
    )
    objects = (workers, leader, leaders, lws)
    assert adopted(leader, *objects) == Adopted(job_of(lws, "llama-1"), 3, 4, (0,), "")
    assert adopted(worker, *objects) == Adopted(job_of(lws, "llama-1"), 3, 4, (2,), "")
    leader["metadata"]["labels"][f"{LWS}group-index"] = "0"
    assert adopted(leader, *objects).key == job_of(lws, "llama")
    del leader["metadata"]["labels"][f"{LWS}group-index"]
    assert "group-index" in refused(leader, *objects)


def test_a_volcano_job_counts_its_tasks_and_is_not_taken_for_a_job_of_kubernetes() -> None:
    tasks = [
        {"name": "master", "replicas": 1, "template": OPTED_IN},
        {"name": "worker", "replicas": 2, "template": OPTED_IN},
    ]
    owner = made("batch.volcano.sh/v1alpha1", "Job", "llama", {
        "minAvailable": 3, "schedulerName": "volcano", "plugins": {"pytorch": [], "env": []}, "tasks": tasks,
    })  # fmt: skip
    says = {"volcano.sh/task-spec": "worker", "volcano.sh/task-index": "1", "volcano.sh/job-name": "llama"}
    env = {"VC_TASK_INDEX": "1", "RANK": "2", "WORLD_SIZE": "3"}
    member = pod("llama-worker-1", owner, says, {**says, "scheduling.k8s.io/group-name": "llama-1"}, env)
    assert adopted(member, owner) == Adopted(job_of(owner), 3, 4, (1, 1), "worker")
    without_labels = pod("llama-worker-1", owner, {}, says, env)
    assert adopted(without_labels, owner).order == (1, 1)


def test_a_trainjob_has_the_size_of_the_nodes_in_its_jobset() -> None:
    def replicated(name: str, pods: int) -> Json:
        label = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer" if name == "node" else name}
        spec = {"parallelism": pods, "completions": pods, "template": NOT_OPTED_IN}
        return {"name": name, "replicas": 1, "template": {"metadata": {"labels": label}, "spec": spec}}

    owner = made("trainer.kubeflow.org/v1alpha1", "TrainJob", "llama", {"trainer": {"numNodes": 4}})
    parts = [replicated("dataset-initializer", 1), replicated("model-initializer", 1), replicated("node", 4)]
    jobset = made("jobset.x-k8s.io/v1alpha2", "JobSet", "llama", {"replicatedJobs": parts}, owner)
    job = made("batch/v1", "Job", "llama-node-0", {"parallelism": 4}, jobset)
    labels = {f"{JOBSET}replicatedjob-name": "node", f"{JOBSET}job-global-index": "2", COMPLETION: "3"}
    env = {
        "PET_NNODES": "4",
        "PET_NODE_RANK": f"metadata.annotations['{COMPLETION}']",
        "PET_MASTER_ADDR": "llama-node-0-0.llama",
    }
    member = pod("llama-node-0-3-x7k2p", job, labels, {COMPLETION: "3"}, env, members=4)
    assert adopted(member, job, jobset, owner) == Adopted(job_of(owner), 4, 4, (2, 3), "node")
    labels[f"{JOBSET}replicatedjob-name"] = "dataset-initializer"
    assert "does not train" in refused(pod("d", job, labels), job, jobset, owner)
    assert "does not belong to a JobSet" in refused(pod("n", owner), owner)


def ray_group(name: str, **numbers: int) -> Json:
    return {"groupName": name, "template": OPTED_IN, "rayStartParams": {}, **numbers}


def test_the_workers_of_a_raycluster_train_and_its_head_does_not() -> None:
    groups = [ray_group("gpu", replicas=2, numOfHosts=2), ray_group("extra", replicas=1)]
    spec = {"headGroupSpec": {"template": NOT_OPTED_IN}, "workerGroupSpecs": groups}
    owner = made("ray.io/v1", "RayCluster", "llama", spec)
    labels = {"ray.io/cluster": "llama", "ray.io/node-type": "worker", "ray.io/group": "gpu"}
    hosts = {"ray.io/worker-group-replica-index": "1", "ray.io/replica-host-index": "0"}
    env = {"RAY_ADDRESS": "llama-head-svc.team.svc:6379", "RAY_CLUSTER_NAME": "llama"}
    member = pod("llama-gpu-worker-x7k2p", owner, {**labels, **hosts}, env=env)
    assert adopted(member, owner) == Adopted(job_of(owner), 5, 4, (1, 0), "gpu")
    head = pod("llama-head-x7k2p", owner, {"ray.io/node-type": "head", "ray.io/group": "headgroup"})
    assert "'headgroup', which does not train" in refused(head, owner)


def test_a_rayjob_has_the_size_of_its_raycluster_and_its_submitter_does_not_count() -> None:
    owner = made("ray.io/v1", "RayJob", "llama", {"rayClusterSpec": {}})
    groups = {"workerGroupSpecs": [ray_group("gpu", replicas=2)]}
    cluster = made("ray.io/v1", "RayCluster", "llama-x7k2p", groups, owner)
    member = pod("llama-x7k2p-gpu-worker-a", cluster, {"ray.io/group": "gpu"})
    assert adopted(member, cluster, owner) == Adopted(job_of(owner), 2, 4, (), "gpu")
    job = made("batch/v1", "Job", "llama", {"parallelism": 1}, owner)
    assert "does not belong to a RayCluster of RayJob" in refused(pod("llama-s", job), job, owner)


def test_an_elasticjob_of_torchelastic_has_the_replicas_of_the_moment() -> None:
    spec = {
        "minReplicas": 1,
        "maxReplicas": 4,
        "replicaSpecs": {"Worker": {"replicas": 2, "template": OPTED_IN}},
    }
    owner = made("elastic.pytorch.org/v1alpha1", "ElasticJob", "llama", spec)
    labels = {
        "job-name": "llama",
        "group-name": "elastic.pytorch.org",
        "replica-type": "worker",
        "replica-index": "1",
    }
    member = pod("llama-worker-1", owner, labels, members="1:4")
    assert adopted(member, owner) == Adopted(job_of(owner), 2, 4, (1, 1), "worker")


def test_the_pods_of_a_dlrover_job_belong_to_it_through_their_master() -> None:
    parts = {"worker": {"replicas": 2, "restartCount": 3, "template": OPTED_IN}}
    spec = {"distributionStrategy": "AllreduceStrategy", "replicaSpecs": parts}
    owner = made("elastic.iml.github.io/v1alpha1", "ElasticJob", "llama", spec)
    master = pod("elasticjob-llama-dlrover-master", owner, {f"{DLROVER}replica-type": "dlrover-master"})
    labels = {
        "app": "dlrover",
        f"{DLROVER}name": "llama",
        f"{DLROVER}replica-type": "worker",
        f"{DLROVER}replica-index": "5",
        f"{DLROVER}rank-index": "1",
        f"{DLROVER}relaunch-count": "1",
    }
    env = {"NODE_RANK": "1", "NODE_NUM": "2", "RANK": "1", "WORLD_SIZE": "2", "NODE_TYPE": "worker"}
    member = pod("llama-edljob-worker-5", master, labels, env=env)
    del member["metadata"]["ownerReferences"][0]["controller"]
    assert adopted(member, master, owner) == Adopted(job_of(owner), 2, 4, (1, 1), "worker")
    assert "does not train" in refused(master, owner)


def test_a_deployment_is_the_job_and_not_its_replicaset() -> None:
    owner = made("apps/v1", "Deployment", "llama", {"replicas": 2, "template": OPTED_IN})
    replicas = made("apps/v1", "ReplicaSet", "llama-5d4f", {"replicas": 1, "template": OPTED_IN}, owner)
    member = pod("llama-5d4f-x7k2p", replicas, {"pod-template-hash": "5d4f"})
    assert adopted(member, replicas, owner) == Adopted(job_of(owner), 2, 4, (), "")


def test_plain_pods_of_kueue_are_a_job_by_their_group() -> None:
    group = tuple(kueue_pod(f"llama-{index}", str(index)) for index in range(3))
    assert adopted(group[2], group=group) == Adopted(JobKey("team", "llama"), 3, 4, (2,), "")


def test_bare_pods_are_a_job_by_their_annotation() -> None:
    says = {"holdfast.dev/group": "llama", "holdfast.dev/members": "2"}
    group = tuple(pod(name, None, {}, says, {"NODE_RANK": str(n)}) for n, name in enumerate(("a", "b")))
    assert adopted(group[1], group=group) == Adopted(JobKey("team", "llama"), 2, 4, (1,), "")
    assert job_key(group[0], OwnerChain()) == job_key(group[1], OwnerChain())

"""A pod that the webhook missed, and that a job waits for, is replaced once the webhook works again."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest

from supervisor.cluster.missed.replacement import EVICTED, REFUSED_S, REMAINS
from tests.cluster.apparatus.absent_webhook import absent_webhook
from tests.cluster.apparatus.dry_run import without_dry_run
from tests.cluster.apparatus.kubernetes_cluster import ClusterUnderTest, Json
from tests.cluster.apparatus.namespaces import Namespaces
from tests.cluster.apparatus.training_job import RECOVERED_S, Observed, TrainingJob, example

POD, OTHER = "gpt-1", "gpt-0"
SIDECAR = "holdfast-sidecar"
NOTICED_S = 60.0
LEFT_ALONE_S = 30.0  # several times as long as it takes until a pod is evicted


@pytest.fixture(scope="module")
def waiting(installed: ClusterUnderTest, namespaces: Namespaces) -> Iterator[TrainingJob]:
    """Yield a job of two pods that trains forever, while actions are not only announced."""
    with without_dry_run(installed):
        objects = example("statefulset.yaml", "--steps=1000000", "--pace=0.05")
        found = TrainingJob(installed, namespaces.make(), objects)
        found.start()
        found.trains()
        found.supervised_by(0)
        yield found


def events(job: TrainingJob, reason: str) -> list[Json]:
    path = f"/api/v1/namespaces/{job.namespace}/events?fieldSelector=reason={reason}"
    found: list[Json] = job.cluster.read(path)["items"]
    return found


def is_injected(pod: Json) -> bool:
    return SIDECAR in [each["name"] for each in pod["spec"].get("initContainers", ())]


def stay(job: TrainingJob, pods: list[Json], for_s: float) -> None:
    """Return after `for_s`, during which none of these pods may be evicted."""
    until_s = time.monotonic() + for_s
    while time.monotonic() < until_s:
        now = {each["metadata"]["uid"] for each in job.pods()}
        assert now >= {each["metadata"]["uid"] for each in pods}, json.dumps(job.status())
        time.sleep(1.0)


def lose(job: TrainingJob) -> tuple[Observed, Json]:
    """Evict a member while the webhook is away. Return what was before, and the missed successor.

    The webhook is back on return.
    """
    before = job.observe()
    with absent_webhook(job.cluster):
        job.cluster.kubectl("delete", "pod", POD, "-n", job.namespace, "--wait=false")

        def look() -> Json | None:
            found = next((each for each in job.pods() if each["metadata"]["name"] == POD), None)
            is_new = found is not None and found["metadata"]["uid"] != before.pods[POD]
            return found if is_new else None

        missed: Json = job.until(look, "the owner has created a successor", RECOVERED_S)
        assert not is_injected(missed)
        told = job.until(
            lambda: next((each for each in job.view().get("warnings", ()) if POD in each), None),
            "the status says what the job waits for",
            NOTICED_S,
        )
        assert "webhook" in told
        stay(job, [missed], REFUSED_S + 5)
    return before, missed


def is_replaced(job: TrainingJob, before: Observed, missed: Json) -> None:
    incident = job.recovered(before)
    assert (incident["kind"], incident["rank"]) == ("member_lost", 1), incident["why"]
    now = job.pod(POD)
    assert is_injected(now)
    assert now["metadata"]["uid"] != missed["metadata"]["uid"]
    assert job.pod(OTHER)["metadata"]["uid"] == before.pods[OTHER]
    assert any("creates it again" in each for each in incident["missed_pods"]), incident


def test_the_pod_that_a_job_waits_for_is_replaced_and_this_is_told(waiting: TrainingJob) -> None:
    before, missed = lose(waiting)
    is_replaced(waiting, before, missed)
    kinds = {each["involvedObject"]["kind"] for each in events(waiting, EVICTED)}
    assert kinds == {"Pod", "Supervision"}
    (about,) = [each for each in events(waiting, EVICTED) if each["involvedObject"]["kind"] == "Pod"]
    assert about["involvedObject"]["uid"] == missed["metadata"]["uid"]
    said = [each for each in events(waiting, REMAINS) if each["involvedObject"]["kind"] == "Supervision"]
    assert any("the webhook does not inject its pods yet" in each["message"] for each in said)


def test_it_is_replaced_even_if_the_quota_has_no_room_for_another_pod(waiting: TrainingJob) -> None:
    quota = ("-n", waiting.namespace, "quota", "full")
    waiting.cluster.kubectl("create", *quota, "--hard=pods=2")
    try:
        before, missed = lose(waiting)
        is_replaced(waiting, before, missed)
    finally:
        waiting.cluster.kubectl("delete", *quota)


def test_a_disruption_budget_is_honoured_and_told(waiting: TrainingJob) -> None:
    budget = ("-n", waiting.namespace, "poddisruptionbudget", "gpt")
    waiting.cluster.kubectl("create", *budget, "--selector=app=gpt", "--min-available=2")
    try:
        before, missed = lose(waiting)

        def look() -> str | None:
            found = [each["message"] for each in events(waiting, REMAINS)]
            return next((each for each in found if "disruption budget" in each), None)

        waiting.until(look, "an event says that the budget does not allow the eviction", NOTICED_S)
        assert waiting.pod(POD)["metadata"]["uid"] == missed["metadata"]["uid"]
    finally:
        waiting.cluster.kubectl("delete", *budget)
    is_replaced(waiting, before, missed)


def test_a_missed_pod_of_a_job_that_lacks_nobody_is_left_alone(waiting: TrainingJob) -> None:
    """It is scaled up while the webhook is away, so there is one pod more than the run trains with."""
    scale = ("scale", "-n", waiting.namespace, "statefulset/gpt")
    try:
        with absent_webhook(waiting.cluster):
            waiting.cluster.kubectl(*scale, "--replicas=3")
            extra: Json = waiting.until(
                lambda: waiting.pod("gpt-2") or None, "the owner has created a third pod", RECOVERED_S
            )
        assert not is_injected(extra)
        generation = waiting.observe().generation
        stay(waiting, [extra], LEFT_ALONE_S)
        assert waiting.observe().generation == generation
    finally:
        waiting.cluster.kubectl(*scale, "--replicas=2")


def test_the_missed_pods_of_a_whole_job_train_on_without_holdfast(
    installed: ClusterUnderTest, namespaces: Namespaces, waiting: TrainingJob
) -> None:
    assert waiting
    found = TrainingJob(installed, namespaces.make(), example("job.yaml", "--steps=100000", "--pace=0.05"))
    with absent_webhook(installed):
        found.start()
        pods = found.until(
            lambda: each if len(each := found.pods()) == 2 else None, "both pods exist", RECOVERED_S
        )
    stay(found, pods, LEFT_ALONE_S)
    installed.kubectl("delete", "-n", found.namespace, "job/gpt", "--wait=false")

"""Make the objects of the jobs for the API server, from the examples."""

from __future__ import annotations

import json
from typing import Any

from bench.chaos.job_table import ChaosJob
from tests.cluster.apparatus.training_job import example, pods_in

PACE_S = 0.1  # the shortest duration of a step: three jobs of two ranks then take about one core
SECRET = "chaos-s3"
BUCKET = "checkpoints"
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_LABELS = {"app": "gpt"}
_APART = {"labelSelector": {"matchLabels": _LABELS}, "topologyKey": "kubernetes.io/hostname"}


def objects(job: ChaosJob, steps: int, pace_s: float) -> list[dict[str, Any]]:
    """Return the objects of a job that trains for `steps` steps. All jobs do the same training."""
    given = {
        # The floor is above the longest step on a busy machine; a rank that spins counts as hung.
        "holdfast.dev/hang-floor": "15s",
        "holdfast.dev/max-restarts": "100000",
    }
    if job.standby:
        given["holdfast.dev/standby"] = str(job.standby)
    if job.stored:
        given["holdfast.dev/checkpoints"] = f"s3://{BUCKET}/{job.prefix}"
        given["holdfast.dev/checkpoints-secret"] = SECRET
        given["holdfast.dev/checkpoint-every"] = "5s"
    words = (f"--steps={steps}", f"--pace={pace_s:g}", "--log-every=100", "--digest=-")
    found = example(job.example, *words, annotations=given)
    for pod in pods_in(found):
        pod["metadata"].setdefault("labels", {}).update(_LABELS)
        pod["spec"]["affinity"] = {"podAntiAffinity": {_REQUIRED: [json.loads(json.dumps(_APART))]}}
    return found

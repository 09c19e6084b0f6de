"""The objects of both jobs come from the examples, and must not collide in one namespace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from supervisor.cli.on_cluster.demo.training import FILES, SUPERVISED, TWIN, renamed

EXAMPLES = Path(__file__).parents[6] / "examples" / "kubernetes"
ARGS = ("--tiny", "--steps=7")


def objects(name: str, image: str = "holdfast:dev") -> dict[str, Any]:
    """Return the objects of one of the jobs by kind."""
    found = list(yaml.safe_load_all((EXAMPLES / FILES[name]).read_text()))
    return {each["kind"]: each for each in renamed(found, name, ARGS, image)}


def test_the_supervised_job_is_the_example_with_other_arguments() -> None:
    [example] = yaml.safe_load_all((EXAMPLES / "job.yaml").read_text())
    found = objects(SUPERVISED)["Job"]
    assert found["spec"]["template"]["spec"]["containers"][0].pop("args") == list(ARGS)
    example["spec"]["template"]["spec"]["containers"][0].pop("args")
    assert found == example


def test_the_job_without_holdfast_has_its_own_names_and_its_own_master() -> None:
    found = objects(TWIN)
    job, service = found["Job"], found["Service"]
    pod = job["spec"]["template"]
    assert {job["metadata"]["name"], service["metadata"]["name"], pod["spec"]["subdomain"]} == {TWIN}
    assert service["spec"]["selector"] == pod["metadata"]["labels"] == {"app": TWIN}
    trainer = pod["spec"]["containers"][0]
    assert f"--master-addr={TWIN}-0.{TWIN}" in trainer["command"]
    assert trainer["command"][-1] == "trainer.gpt"
    assert trainer["args"] == list(ARGS)


def test_the_twin_takes_the_library_from_the_image_that_is_installed() -> None:
    text = json.dumps(objects(TWIN, "registry.example/holdfast:1"))
    assert "registry.example/holdfast:1" in text
    assert "holdfast:dev" not in text
    assert "holdfast-trainer:dev" in text

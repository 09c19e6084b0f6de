"""Manifests in the shape of public projects' manifests are injected as expected, or a note states why not.

`tests/samples/manifests` has the manifests, each with its source. The kind, the replica types, the containers
and the way in which the command starts the training are as in the source; the words are our own.
`public_manifests.toml` has the expected results.
"""

from __future__ import annotations

import copy
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast import launch_commands
from supervisor.admission import manifest, pod_layout
from supervisor.admission.injection import Injected, record_of
from supervisor.admission.manifest import inject_manifest
from supervisor.cluster.adoption.owner_size import owner_size
from supervisor.cluster.adoption.untrusted_json import UnfitObject
from supervisor.cluster.adoption.workload_kinds import shipped
from tests.unit.supervisor.admission.pods import CONTEXT, injected

if sys.version_info >= (3, 11):
    import tomllib as _toml
else:
    import tomli as _toml

yaml = pytest.importorskip("yaml")

SAMPLES = Path(__file__).parents[3].parent / "tests/samples/manifests"
TABLE = _toml.loads(Path(__file__).with_name("public_manifests.toml").read_text())
ROWS = TABLE["manifest"]
NAMES = [row["file"] for row in ROWS]
LAUNCH = ("-c", launch_commands.START, pod_layout.LIBRARY, "--warm", "auto", "--")
LICENCES = ("(Apache-2.0)", "(MIT)", "(MIT-0)", "(BSD-3-Clause)")
# the note for most of them
ABOUT_STORAGE = ("no checkpoints are written, and the state is lost with the pods", "the sidecar requests")
ASKS = 'holdfast.dev/inject: "true"'


def text_of(name: str) -> str:
    return (SAMPLES / f"{name}.yaml").read_text()


def documents(text: str) -> list[Any]:
    return [each for each in yaml.load_all(text, Loader=manifest._loader(yaml)) if each is not None]


def templates(text: str) -> dict[str, Any]:
    """Return each pod template of a manifest by its place."""
    found = {}
    for document in documents(text):
        for owner, path, holder, key in manifest._templates([document]):
            name = owner["metadata"].get("name") or owner["metadata"]["generateName"]
            found[f"{owner['kind']} {name}{path}"] = holder[key]
    return found


def expected_command(words: list[str]) -> list[str]:
    """Return the expected command of a container. LAUNCH after a Python stands for our launcher."""
    found: list[str] = []
    for word in words:
        found += LAUNCH if word == "LAUNCH" else [word.replace("LAUNCH", shlex.join(LAUNCH))]
    return found


def test_every_manifest_has_a_row_and_names_its_source_and_licence() -> None:
    assert sorted(NAMES) == sorted(path.stem for path in SAMPLES.glob("*.yaml"))
    assert len(NAMES) >= 30
    for name in NAMES:
        head = text_of(name).partition("\napiVersion")[0]
        assert "github.com/" in head
        assert any(each in head for each in LICENCES), name


@pytest.mark.parametrize("row", ROWS, ids=NAMES)
def test_each_pod_is_injected_as_expected_or_a_note_states_why_not(row: dict[str, Any]) -> None:
    text = text_of(row["file"])
    before, after = templates(text), templates(inject_manifest(text, CONTEXT)[0])
    told = [(note.place, note.text) for note in inject_manifest(text, CONTEXT)[1]]
    assert set(row["pods"]) == {place for place, _ in told}
    for place, want in row["pods"].items():
        if "why" in want:
            assert (place, f"not injected: {want['why']}") in told
            assert after.get(place) == before.get(place)
            continue
        record = record_of(after[place]["metadata"]["annotations"])
        assert record is not None
        assert (record.container, record.nproc, record.members) == (
            want["container"],
            want["ranks"],
            want.get("nodes"),
        )
        (trains,) = [each for each in after[place]["spec"]["containers"] if each["name"] == record.container]
        assert trains["command"] == expected_command(want["command"])
        assert not trains.get("args")
        first, *others = [each for where, each in told if where == place]
        assert first.startswith("injected, ")
        assert [each for each in others if not each.startswith(ABOUT_STORAGE)] == want.get("notes", [])


@pytest.mark.parametrize("row", ROWS, ids=NAMES)
def test_everything_of_the_users_but_the_command_stays(row: dict[str, Any]) -> None:
    before = templates(text_of(row["file"]))
    after = templates(inject_manifest(text_of(row["file"]), CONTEXT)[0])
    for place, pod in before.items():
        for kind in ("initContainers", "containers", "volumes"):
            kept = {each["name"]: each for each in after[place]["spec"].get(kind, ())}
            for each in pod["spec"].get(kind, ()):
                found = kept[each["name"]]
                assert {**found, **without_launch(each)} == found
                for part in ("env", "volumeMounts"):
                    mine = each.get(part, [])
                    assert found.get(part, [])[: len(mine)] == mine


def without_launch(container: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value
        for key, value in container.items()
        if key not in ("command", "args", "env", "volumeMounts")
    }


@pytest.mark.parametrize("name", NAMES)
def test_injecting_is_deterministic_and_a_second_time_changes_nothing(name: str) -> None:
    once, _ = inject_manifest(text_of(name), CONTEXT)
    assert inject_manifest(text_of(name), CONTEXT)[0] == once
    assert inject_manifest(once, CONTEXT)[0] == once
    for pod in templates(once).values():
        if record_of((pod.get("metadata") or {}).get("annotations") or {}):
            again: Injected = injected(copy.deepcopy(pod))
            assert (again.pod, again.patch) == (pod, [])


@pytest.mark.parametrize("name", NAMES)
def test_a_twin_that_does_not_opt_in_is_unchanged_byte_for_byte(name: str) -> None:
    assert ASKS in text_of(name)
    for twin in (
        text_of(name).replace(ASKS, 'example.com/inject: "true"'),
        text_of(name).replace(ASKS, ASKS.replace("true", "false")),
    ):
        assert inject_manifest(twin, CONTEXT) == (twin, ())


@pytest.mark.parametrize("row", [row for row in ROWS if "size" in row], ids=lambda row: row["file"])
def test_the_owner_determines_how_many_pods_train(row: dict[str, Any]) -> None:
    """For each replica type, `size` has the number of pods that train, or the reason why its pods do not."""
    owner = documents(text_of(row["file"]))[-1]
    kind = shipped().find(owner["apiVersion"], owner["kind"])
    assert kind is not None
    for replica_type, expected in row["size"].items():
        asked = (owner, f"{owner['kind']} llama", kind, frozenset(kind.idle), replica_type)
        if isinstance(expected, int):
            assert owner_size(*asked) == expected
            continue
        with pytest.raises(UnfitObject) as raised:
            owner_size(*asked)
        assert str(raised.value) == expected

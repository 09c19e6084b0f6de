from __future__ import annotations

import errno
import io
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from supervisor import __main__ as program
from supervisor.cli.command_options import InjectManifest
from supervisor.cli.on_cluster.manifest import show
from supervisor.display.screen import Unwritable
from tests.unit.supervisor.cli.on_cluster.test_connection import Printed, refused

POD = """# kept
apiVersion: v1
kind: ConfigMap
metadata: {name: other}   # as it is
---
apiVersion: v1
kind: Pod
metadata: {name: gpt, annotations: {holdfast.dev/inject: "true"}}
spec: {containers: [{name: main, image: mine, command: [%s]}]}
"""


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    path = tmp_path / "pod.yaml"
    path.write_text(POD % "python, train.py")
    return path


def test_the_manifest_is_printed_as_it_would_be_injected(capsys: Printed, manifest: Path) -> None:
    assert program.main(["inject-manifest", str(manifest)]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(POD.partition("---")[0])
    assert "image: holdfast:dev" in out
    assert err.startswith(f"holdfast: {manifest}: Pod gpt: injected, 1 rank in the container main\n")
    assert program.main(["inject-manifest", str(manifest), "--image", "registry/holdfast:1"]) == 0
    out, _ = capsys.readouterr()
    assert "image: registry/holdfast:1" in out
    assert "holdfast:dev" not in out


def test_a_manifest_is_read_from_the_standard_input(capsys: Printed, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (POD % "python, train.py").encode()
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(text)))
    assert program.main(["inject-manifest", "-"]) == 0
    out, err = capsys.readouterr()
    assert "holdfast-sidecar" in out
    assert err.startswith("holdfast: standard input: Pod gpt: injected")


def test_a_template_that_cannot_be_injected_is_printed_unchanged_with_exit_code_1(
    capsys: Printed, manifest: Path
) -> None:
    manifest.write_text(POD % "python, train.py" + "---\n" + POD % "./mystery")
    assert program.main(["inject-manifest", str(manifest)]) == 1
    assert "Pod gpt: not injected: " in capsys.readouterr().err


def test_a_manifest_without_an_opt_in_is_refused(capsys: Printed, manifest: Path) -> None:
    text = (POD % "python, train.py").replace(', annotations: {holdfast.dev/inject: "true"}', "")
    manifest.write_text(text)
    assert refused(f"inject-manifest {manifest}", capsys) == (
        f"{manifest}: no pod template requests Holdfast: add the annotation"
        ' holdfast.dev/inject: "true" to the metadata of the template'
    )


def test_unknown_keys_of_holdfast_are_named_if_nothing_requests_it(capsys: Printed, manifest: Path) -> None:
    """`holdfast inject-manifest FILE | kubectl apply -f -` would otherwise train unprotected."""
    for key, said in {
        "holdfast.dev/enabled": "unknown annotation: did you mean 'holdfast.dev/inject'?",
        "holdfast.dev/protection-level": "unknown annotation; known are holdfast.dev/",
        "holdfast.dev/injct": "unknown: did you mean the annotation 'holdfast.dev/inject'?",
        "holdfast.dev/chekpoints": "unknown annotation: did you mean 'holdfast.dev/checkpoints'?",
    }.items():
        manifest.write_text((POD % "python, train.py").replace("holdfast.dev/inject", key))
        assert program.main(["inject-manifest", str(manifest)]) == 2
        out, err = capsys.readouterr()
        assert said in err
        assert out == ""


@pytest.mark.parametrize("text", ["", "- 7\n", "kind: ConfigMap\n", "kind: ConfigMap\n---\nkind: Service\n"])
def test_a_manifest_without_a_pod_template_is_refused(capsys: Printed, manifest: Path, text: str) -> None:
    manifest.write_text(text)
    assert refused(f"inject-manifest {manifest}", capsys) == (
        f"{manifest}: no pod template: expected the manifest of a Pod, or of an object that contains a pod"
        " template, such as a Job"
    )


def test_an_object_whose_template_is_elsewhere_is_still_named(capsys: Printed, manifest: Path) -> None:
    manifest.write_text('kind: TrainJob\nspec: {annotations: {holdfast.dev/inject: "true"}}\n')
    assert program.main(["inject-manifest", str(manifest)]) == 1
    assert "TrainJob: not injected: its pod template is in another object" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read: No such file or directory; give a YAML file, or -"),
        (b"a: [", "pod.yaml: the manifest is not YAML: "),
        (b"\xff\xfe", "is not text in UTF-8: give a YAML file, or -"),
    ],
)
def test_an_unreadable_file_is_named(
    capsys: Printed, tmp_path: Path, content: bytes | None, said: str
) -> None:
    path = tmp_path / "pod.yaml"
    if content is not None:
        path.write_bytes(content)
    assert said in refused(f"inject-manifest {path}", capsys)
    assert "Is a directory" in refused(f"inject-manifest {tmp_path}", capsys)


def test_a_full_disk_is_reported(manifest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with io.TextIOWrapper(io.BufferedWriter(Full())) as full:
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(Unwritable, match="No space left"):
            show(InjectManifest(str(manifest)))


class Full(io.RawIOBase):
    """A file on a full disk. It accepts the remaining data at the end, so that it can be closed."""

    def __init__(self) -> None:
        self._refusals = 1

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        if self._refusals:
            self._refusals -= 1
            raise OSError(errno.ENOSPC, "No space left on device")
        return len(data)

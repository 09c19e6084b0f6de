import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.manifests import kubernetes_files
from trainer.gpt.corpus import VALIDATION_SHARE, Corpus, load, split
from trainer.gpt.options import TINY
from trainer.options import BadValue


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def first_bytes(corpus: Corpus) -> bytes:
    return bytes(corpus.train[0].tolist())


def test_files_are_read_in_the_order_of_their_names_and_hidden_ones_are_not(tmp_path: Path) -> None:
    write(tmp_path, {"b.txt": b"b" * 40, "a/z.txt": b"z" * 3, ".git/x": b"x" * 99, "c": b"c" * 40})
    corpus = load(tmp_path, context=4, max_bytes=1000)
    assert first_bytes(corpus) == b"zzzbb"
    assert corpus.train.shape == (19, 5)  # 83 bytes: 20 samples, one of them set aside
    assert corpus.validation.shape == (1, 5)


def test_at_most_the_allowed_bytes_are_read(tmp_path: Path) -> None:
    write(tmp_path, {"a": b"a" * 150, "b": b"b" * 1000, "c/d": b"d" * 10})
    (tmp_path / "c" / "not a file").symlink_to("nowhere")
    corpus = load(tmp_path, context=1, max_bytes=200)
    assert len(corpus.train) + len(corpus.validation) == 199
    assert set(corpus.train.flatten().tolist()) == {ord("a"), ord("b")}


def test_a_link_to_a_parent_folder_is_not_followed(tmp_path: Path) -> None:
    write(tmp_path, {"in/a": b"a" * 64})
    (tmp_path / "in" / "loop").symlink_to(tmp_path)
    assert len(load(tmp_path, context=1, max_bytes=10_000).train) == 60


def test_the_sources_of_this_python_are_the_reproducible_default() -> None:
    one, two = (load(None, context=32, max_bytes=100_000) for _ in range(2))
    assert torch.equal(one.train, two.train)
    assert torch.equal(one.validation, two.validation)
    assert b"import " in bytes(one.train.flatten().tolist())


def test_a_folder_without_enough_text_is_named_with_the_required_size(tmp_path: Path) -> None:
    with pytest.raises(BadValue, match=r"--data: .* has 0 bytes .* --context 8 needs 144 or more"):
        load(tmp_path, context=8, max_bytes=1000)
    write(tmp_path, {"a": b"a" * 143})
    with pytest.raises(BadValue, match="has 143 bytes"):
        load(tmp_path, context=8, max_bytes=1000)
    write(tmp_path, {"a": b"a" * 144})
    assert len(load(tmp_path, context=8, max_bytes=1000).validation) == 1


def test_a_path_that_is_not_a_folder_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "missing", *write(tmp_path, {"file": b""}).iterdir()):
        with pytest.raises(BadValue, match=f"--data: {path} is not a directory"):
            load(path, context=8, max_bytes=1000)


@given(st.integers(1, 9), st.integers(0, 300))
def test_samples_cover_the_text_without_gaps(context: int, more: int) -> None:
    text = torch.arange((context + 1) * VALIDATION_SHARE + more, dtype=torch.int64)
    corpus = split(text, context)
    starts = sorted(corpus.train[:, 0].tolist() + corpus.validation[:, 0].tolist())
    assert starts == list(range(0, len(text) - context, context))
    assert torch.equal(corpus.train[:, -1], corpus.train[:, 0] + context)
    assert len(corpus.validation) == len(starts) // VALIDATION_SHARE >= 1


def test_the_example_with_a_claim_prepares_the_text_that_the_other_examples_train_on(tmp_path: Path) -> None:
    """Its init container may run twice, and in two pods at the same time."""
    example = kubernetes_files.load(kubernetes_files.EXAMPLES / "pytorchjob-guide.yaml")
    pod, _ = kubernetes_files.pods(example)
    prepare = next(each for each in pod["spec"]["initContainers"] if each["name"] == "data")
    code = prepare["args"][0].replace("/data/", f"{tmp_path}/")
    for _ in range(2):
        subprocess.run([sys.executable, "-c", code], check=True)
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]
    prepared, usual = (
        load(folder, context=TINY["context"], max_bytes=TINY["max_bytes"]) for folder in (tmp_path, None)
    )
    assert torch.equal(prepared.train, usual.train)
    assert torch.equal(prepared.validation, usual.validation)

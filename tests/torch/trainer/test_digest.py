import json
import random
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch
from torch import Tensor, nn

from trainer.digest import PARTS, combined, digests, gather, report, write
from trainer.options import PRINTED
from trainer.repeatable import seed_everything


def trained(
    make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    seed_everything(0, 0)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    optimizer = make(model.parameters(), lr=0.1)
    model(torch.randn(4, 3)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[str, Tensor]]:
    return [
        *(("parameters", parameter.data) for parameter in model.parameters()),
        *(("buffers", buffer) for buffer in model.buffers()),
        *(("optimizer", value) for state in optimizer.state.values() for value in state.values()),
    ]


def test_any_flipped_bit_changes_only_the_digest_of_its_part() -> None:
    """One bit of each byte is flipped, at changing positions."""
    model, optimizer = trained()
    before = digests(model, optimizer)
    for part, tensor in tensors(model, optimizer):
        raw = tensor.reshape(-1).view(torch.uint8)
        for at in range(raw.numel()):
            bit = 1 << at * 5 % 8
            raw[at] ^= bit
            after = digests(model, optimizer)
            raw[at] ^= bit
            assert {name for name in PARTS if after[name] != before[name]} == {part}
            assert combined(after) != combined(before)
    assert digests(model, optimizer) == before


def test_equal_runs_have_equal_digests_and_different_optimizers_different_ones() -> None:
    again = trained()
    assert digests(*again) == digests(*trained())
    other = digests(*trained(torch.optim.SGD))
    assert other["optimizer"] != digests(*again)["optimizer"]


@pytest.mark.parametrize(
    "draw",
    [random.random, lambda: torch.rand(1), lambda: numpy.random.rand()],
    ids=["python", "torch", "numpy"],
)
def test_a_random_draw_changes_only_the_random_part(draw: Callable[[], object]) -> None:
    model, optimizer = trained()
    before = digests(model, optimizer)
    draw()
    after = digests(model, optimizer)
    assert {name for name in PARTS if after[name] != before[name]} == {"rng"}


def test_type_shape_and_settings_change_the_digest() -> None:
    def of(tensor: Tensor, lr: float = 0.1) -> str:
        model = nn.Module()
        model.register_parameter("weight", nn.Parameter(torch.zeros(1)))
        model.register_buffer("buffer", tensor)
        return combined(digests(model, torch.optim.SGD(model.parameters(), lr=lr)))

    zeros = torch.zeros(4)
    variants = [of(zeros), of(zeros.view(2, 2)), of(zeros.int()), of(zeros[:0]), of(zeros, lr=0.2)]
    assert len(set(variants)) == len(variants)
    assert of(torch.zeros(2, 4).T) == of(torch.zeros(4, 2)), "values count, strides do not"
    assert of(zeros.bfloat16()) != of(zeros.half())


def test_the_digests_of_all_ranks_are_gathered_printed_and_written(
    group: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, optimizer = trained()
    parts = digests(model, optimizer)
    device = torch.device("cpu")
    assert gather(parts, device) == [parts]
    report(model, optimizer, device, tmp_path / "digest.json")
    assert capsys.readouterr().out == f"digest {combined(parts)}\n"
    found = json.loads((tmp_path / "digest.json").read_text())
    assert found == {"0": {**parts, "all": combined(parts)}}


def test_the_digests_of_all_ranks_are_printed_on_request(
    group: None, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    parts = digests(*trained())
    report(*trained(), torch.device("cpu"), PRINTED)
    table, digest = capsys.readouterr().out.splitlines()
    assert json.loads(table.removeprefix("digests ")) == {"0": {**parts, "all": combined(parts)}}
    assert digest == f"digest {combined(parts)}"
    assert list(tmp_path.iterdir()) == []


def test_the_file_is_replaced_atomically(tmp_path: Path) -> None:
    path = tmp_path / "digest.json"
    path.write_text("old")
    parts = digests(*trained())
    write(path, [parts, parts])
    assert list(json.loads(path.read_text())) == ["0", "1"]
    assert list(tmp_path.iterdir()) == [path]

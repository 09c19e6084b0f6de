import random
import sys
from pathlib import Path

import pytest
import torch

from trainer.digest import digests
from trainer.gpt.__main__ import loss_on, main, validate
from trainer.gpt.model import GPT
from trainer.gpt.options import make_parser, read

CPU = torch.device("cpu")


def test_validation_changes_neither_state_nor_random_numbers(group: None) -> None:
    torch.manual_seed(0)
    options = read(make_parser(), ["--tiny", "--val-batches", "3"])
    model = GPT(layers=1, heads=2, width=16, context=8, dropout=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    text = torch.randint(256, (10, 9), dtype=torch.uint8)  # fewer than three batches
    before, python = digests(model, optimizer), random.getstate()
    loss = validate(model, text, options, CPU)
    assert digests(model, optimizer) == before
    assert random.getstate() == python
    assert model.training
    model.eval()
    assert loss == pytest.approx(loss_on(model, text, CPU, None).item(), rel=1e-5)


def test_a_folder_without_text_ends_in_one_line_and_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpt", "--data", str(tmp_path)])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    told = capsys.readouterr().err
    assert told.startswith(f"trainer.gpt: error: --data: {tmp_path} has 0 bytes in readable files")
    assert told.count("\n") == 1

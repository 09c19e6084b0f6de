import pytest
import torch

from trainer.log import Log

ONE = torch.ones(())


def steps_told(capsys: pytest.CaptureFixture[str], *, every: int, steps: int, rank: int = 0) -> list[int]:
    log = Log(rank=rank, every=every, steps=steps, unit="images")
    for step in range(steps):
        log.step(step, loss=ONE, norm=ONE, lr=0.1, done=8)
    return [int(line.split()[1]) for line in capsys.readouterr().out.splitlines()]


def test_rank_0_logs_every_nth_step_and_the_last(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert steps_told(capsys, every=4, steps=10) == [0, 4, 8, 9]
    assert steps_told(capsys, every=1, steps=3) == [0, 1, 2]
    assert steps_told(capsys, every=0, steps=3) == []
    assert steps_told(capsys, every=1, steps=3, rank=1) == []


def test_a_line_contains_step_loss_norm_rate_and_throughput(capsys: pytest.CaptureFixture[str]) -> None:
    log = Log(rank=0, every=1, steps=1, unit="tokens")
    with log.aside():
        log.say("step     0  val loss 1.0000")
    log.step(0, loss=ONE * 2.5, norm=ONE, lr=0.001, done=8)
    said, line = capsys.readouterr().out.splitlines()
    assert said.endswith("val loss 1.0000")
    assert line.startswith("step     0  loss 2.5000  grad norm 1.000  lr 1.00e-03  ")
    assert line.endswith(" tokens/s")

import torch

from trainer.digest import digests
from trainer.vision.__main__ import validate
from trainer.vision.images import fake
from trainer.vision.model import ResNet
from trainer.vision.options import make_parser, read


def test_validation_changes_neither_state_nor_random_numbers(group: None) -> None:
    torch.manual_seed(0)
    options = read(make_parser(), ["--tiny", "--fake-data"])
    images = fake(40, 8, seed=0)
    model = ResNet(channels=3, classes=10, blocks=1, width=4, dropout=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = digests(model, optimizer)
    loss, right = validate(model, images, options, torch.device("cpu"))
    assert digests(model, optimizer) == before
    assert model.training
    assert loss > 0
    assert right * 40 == round(right * 40)
